def train(prompts):
    with torch.enable_grad():
        sample(prompts)

def evaluate(prompts):
    with torch.no_grad():
        sample(prompts)
