def train(model, optimizer):
    done = optimizer.step() or 1
    return done
