"""The answer before the spend: does this config fit this machine."""
