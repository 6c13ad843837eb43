def train(model, optimizer):
    if model: optimizer.step()
