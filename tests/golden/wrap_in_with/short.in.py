def train(prompts):
    if prompts:

        sample(prompts)
    return 1
