"""The policy: a Flax decoder with an optional value head, and how its parameters are laid out on a mesh."""
