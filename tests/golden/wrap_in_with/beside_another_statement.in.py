def train(prompts):
    x = 1; sample(prompts)
