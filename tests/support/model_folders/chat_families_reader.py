"""Chat templates of the most used families of models, reduced to what matters for the text of a chat.

`open-think` is like QwQ: the prompt opens the reasoning, and the template writes answers unchanged.
"""

from pathlib import Path
from typing import Final

FAMILIES: Final = {
    path.stem: path.read_text().removesuffix("\n")
    for path in sorted((Path(__file__).parent / "chat_families").iterdir())
}
"""Name of the family -> its template."""
