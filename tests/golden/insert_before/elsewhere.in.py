def main(model, optimizer):
    optimizer.step()

def train():
    pass
