def train(prompts):
    with cast():
        with torch.no_grad(), lean.rollout(
            rows=len(prompts), steps=3,
        ):  # nothing is trained here
            # one rollout
            rewards = sample(
                prompts)
    with torch.no_grad():
        show(rewards)
