"""The TLS of the --ssl-* flags."""

from __future__ import annotations

import ssl

from quire.config.server import ServerConfig
from quire.errors import ConfigError


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What encrypts connections; None without --ssl-certfile. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except (OSError, ValueError) as e:  # an SSLError is an OSError
        raise ConfigError(
            f"TLS cannot be had with --ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile} and what "
            f"goes with them: {e}"
        ) from None
    return context
