"""Environment variables for other programs: an allowlist. Installers also get package indexes with credentials."""

from collections.abc import Mapping

_PROGRAM_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    }
)
_INSTALLER_NAMES = frozenset(
    {
        *("NO_PROXY", "no_proxy", "NETRC", "SSH_AUTH_SOCK", "SSL_CLIENT_CERT", "NIX_SSL_CERT_FILE"),
        *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"),
        *("PKG_CONFIG_PATH", "XDG_BIN_HOME", "XDG_CONFIG_DIRS"),
    }
)
_INSTALLER_PREFIXES = ("UV_", "PIP_", "npm_config_", "NPM_CONFIG_", "GIT_", "CARGO_", "RUSTUP_", "CMAKE_", "PYENV_")


def for_programs(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in _PROGRAM_NAMES or name.startswith("LC_")}


def for_installers(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables for installers, without `VIRTUAL_ENV`."""
    return for_programs(environ) | {
        name: value
        for name, value in environ.items()
        if name in _INSTALLER_NAMES or name.startswith(_INSTALLER_PREFIXES)
    }
