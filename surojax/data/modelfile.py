"""Makes the Modelfile of a GGUF file, from which `ollama create` makes a model.

Its TEMPLATE is a program in Go, so it is there only if the model's chat template renders conversations as a template of
ours does for which such a program is known. Without it ollama looks for a template that it knows in the GGUF file.
"""

from surojax.data.data_rows import NotARow
from surojax.data.templates import load_template
from surojax.data.tokenizer import Tokenizer

# Our templates as ollama's programs.
PROGRAMS = {
    "chatml": """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
""",
    "llama3": """{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

""",
}
TURNS = [
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three."},
]
SYSTEM = "Zero."


def modelfile(name: str, tokenizer: Tokenizer) -> str:
    """Makes the content of a Modelfile.

    name: of the GGUF file, in the same folder. Raises ConfigError for a bad template.
    """
    lines = [f"FROM ./{name}"]
    if (program := _program(tokenizer)) is not None:
        template, system = program
        lines.append(f'TEMPLATE """{PROGRAMS[template]}"""')
        lines += [f'SYSTEM """{system}"""'] if system else []
    stops = (tokenizer.token_text(token) for token in sorted(tokenizer.stop_ids))
    return "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop)]) + "\n"


def _program(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Identifies a chat template: (name in PROGRAMS, its default system message or "").

    None if the tokenizer has no chat template, or another one.
    """
    for template in PROGRAMS if tokenizer.chat_template else ():
        theirs = _rendered("", tokenizer)
        ours = _rendered(template, tokenizer)
        if theirs is None or ours is None or theirs[1] != ours[1]:
            continue
        without, plain = theirs[0], ours[0]
        before, after = ours[1].removesuffix(plain).split(SYSTEM)
        default = without.removesuffix(plain).removeprefix(before).removesuffix(after)
        if without == (before + default + after + plain if default else plain) and '"""' not in default:
            return template, default
    return None


def _rendered(spec: str, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Renders a conversation without and with a system message; None if the template refuses them."""
    template = load_template(spec, tokenizer)
    assert template is not None
    try:
        texts = [
            template.render(messages, add_generation_prompt=True)
            for messages in (TURNS, [{"role": "system", "content": SYSTEM}, *TURNS])
        ]
    except NotARow:
        return None
    without, with_system = (text.removeprefix(tokenizer.bos) for text in texts)  # which the engine adds
    return without, with_system
