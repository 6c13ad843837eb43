def train(prompts):
    with cast():
        with torch.no_grad():  # nothing is trained here
            # one rollout
            rewards = sample(
                prompts)
    with torch.no_grad():
        show(rewards)
