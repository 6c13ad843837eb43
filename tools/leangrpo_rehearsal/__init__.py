"""What a rehearsal runs inside the training interpreter: upstream's script with stand-ins, a recorder, a comparison.

It imports itself, the standard library, torch and upstream's packages, and nothing of the kit: its folder alone is
enough on that interpreter's path.
"""
