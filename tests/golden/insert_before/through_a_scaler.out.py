def train(model, optimizer, scaler, losses):
    for i, loss in enumerate(losses):
        scaler.scale(loss).backward()
        if (i + 1) % 2 == 0:
            lean.flush(model, optimizer)
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
