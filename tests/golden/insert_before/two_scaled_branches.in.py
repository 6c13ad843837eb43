def train(model, optimizer, scaler, losses):
    for i, loss in enumerate(losses):
        loss.backward()
        if (i + 1) % 2 == 0:
            if scaler:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                model.clip_grad_norm_(1.0)
                optimizer.step()
