def train(prompts):
    if prompts: sample(prompts)
