def train(model, optimizer):
    if model:
        lean.flush(model, optimizer)
        optimizer.step()
        optimizer.step()
