def train(model, optimizer, other, scaler):
    if model:
        scaler.step(other)
