def train(prompts):
    with torch.no_grad(), timer() as t:
        sample(prompts)
