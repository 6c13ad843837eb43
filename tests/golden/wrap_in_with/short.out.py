def train(prompts):
    if prompts:

        with lean.rollout(rows=1):
            sample(prompts)
    return 1
