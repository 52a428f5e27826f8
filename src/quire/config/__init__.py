"""The operator's settings: frozen dataclasses, one per subject; every flag is one documented field.

Configs are input only: the engine returns values that it discovers at run time (number of blocks, fitted
context length) in `EngineCoreReadyResponse`, and never writes them back here.
"""
