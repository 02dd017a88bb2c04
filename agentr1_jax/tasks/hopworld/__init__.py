"""HopWorld: a procedural world of films and people, in the shape of HotpotQA."""
