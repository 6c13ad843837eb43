def train(prompts):
    with lean.rollout(rows=1):
        x = sample("""
kept
    as it is
""")
    return x
