def train(prompts):
    # one rollout
    with lean.rollout(
        rows=len(prompts), steps=3,
        window=4,
    ):
        rewards, latents = sample(
                prompts,  # all

                3,
            )  # done
    return rewards
