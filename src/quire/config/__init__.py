"""What the operator asks for. Frozen dataclasses, one per subject; every flag is one documented field.

Configs are input only: what is discovered at run time (number of blocks, fitted context length) is returned by the
engine (`EngineCoreReadyResponse`), never written back here.
"""
