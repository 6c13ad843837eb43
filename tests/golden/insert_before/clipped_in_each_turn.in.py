def train(model, optimizer, losses):
    for i, loss in enumerate(losses):
        loss.backward()
        model.clip_grad_norm_(1.0)
        if (i + 1) % 2 == 0:
            optimizer.step()
