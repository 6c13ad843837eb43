def train(model, optimizer):
    lean.flush(model, optimizer)
    done = optimizer.step() or 1
    return done
