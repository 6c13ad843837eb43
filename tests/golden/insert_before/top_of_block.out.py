def train(model, optimizer, n):
    for i in range(n):
        if (i+1)%2==0:
            lean.flush(model, optimizer)
            # clip first
            norm = model.clip()  # here
            optimizer.step()
            optimizer.zero_grad()
