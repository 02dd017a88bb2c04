"""Environments of Gymnasium's registry as text tasks."""
