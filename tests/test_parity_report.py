"""The report of `convert --check`: our side against stored logits, the other side played by a script.

That it passes with transformers itself is recorded in docs/log; no test needs torch.
"""

import json
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import convert
from flax import nnx
from test_huggingface import config, write
from test_parity import REFERENCE, TOLERANCE, load_config, load_tree
from test_parts import whole

from surojax import ConfigError
from surojax.assembly import from_config
from surojax.inference import parity
from surojax.models.decoder import Decoder


def interpreter(path: Path, body: str) -> str:
    """An executable in place of a Python with transformers; `body` has `request`, `ids` and `answer(**arrays)`."""
    path.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import json, sys
        import numpy as np
        assert sys.argv[1] == "-c" and "AutoModelForCausalLM" in sys.argv[2]
        request = json.load(open(sys.argv[3]))
        ids = request["ids"]
        said = {{"versions": np.array("transformers 0.1"), "missing": np.array([], str)}}
        answer = lambda **arrays: np.savez(sys.argv[4], **(said | arrays))
        """)
        + textwrap.dedent(body)
    )
    path.chmod(0o700)
    return str(path)


def plain_logits(case: str, ids: np.ndarray) -> np.ndarray:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(load_config(case), rngs=nnx.Rngs(0))))
    weights = jax.tree.map(jax.numpy.asarray, load_tree(case, "weight", 2))
    return np.asarray(jax.jit(lambda weights: nnx.merge(graph, weights)(ids))(weights))


def test_our_logits_and_losses_are_those_of_transformers(tmp_path):
    case = "llama3_rope"
    model = from_config.model(config(write(tmp_path / "model", case)))
    ids = list(REFERENCE[f"{case}/tokens"])
    found = parity._logits(model, jax.tree.map(jax.numpy.asarray, load_tree(case, "weight", 2)), ids)
    expected = REFERENCE[f"{case}/logits"]
    assert np.max(np.abs(found - expected)) < TOLERANCE * np.max(np.abs(expected))
    loss = np.mean([parity._loss(logits, of_text) for logits, of_text in zip(expected, ids, strict=True)])
    assert abs(loss - REFERENCE[f"{case}/loss"]) < 1e-6 * loss


@pytest.mark.full
def test_the_report_passes_and_fails(tmp_path, capsys):
    """Equal logits pass with code 0; one logit that is off by more than the limit or NaN, or other tokens, with 1."""
    folder = write(tmp_path / "model", "llama")
    ids = np.random.default_rng(0).integers(0, 96, (4, parity.TOKENS))
    long = np.random.default_rng(1).integers(0, 96, (1, parity.LONG))
    logits = [*plain_logits("llama", ids), plain_logits("llama", long)[0, -parity.TOKENS :]]
    np.save(tmp_path / "logits.npy", logits)
    body = f"""
    assert request["folder"] == {str(folder)!r} and request["file"] == "" and request["texts"] == []
    assert [len(row) for row in ids] == [48, 48, 48, 48, 600] and request["compared"] == 48
    logits = np.load({str(tmp_path / "logits.npy")!r})
    logits[ROW, 5, 7] += SHIFT * np.abs(logits).max()
    ids[1][3] += OTHER
    answer(**{{f"logits{{i}}": logits[i] for i in range(5)}}, **{{f"ids{{i}}": np.array(ids[i]) for i in range(5)}},
           **{{f"loss{{i}}": np.array(1.5) for i in range(5)}})
    """
    cases = [("2", "5e-5", "0", 0), ("2", "2e-4", "0", 1), ("4", "2e-4", "0", 1), ("2", "np.nan", "0", 1)]
    for row, shift, other, code in [*cases, ("2", "0", "1", 1)]:
        changed = body.replace("ROW", row).replace("SHIFT", shift).replace("OTHER", other)
        python = interpreter(tmp_path / "python", changed)
        with pytest.raises(SystemExit) as end:
            convert.main(["--check", str(folder), "--python", python])
        assert end.value.code == code
        said = capsys.readouterr().out
        assert "compared with transformers 0.1, in float32" in said and "1.500000" in said
        assert ("passed: " in said) == (code == 0) and ("other tokens" in said) == (other == "1")
    changed = body.replace("ROW", "2").replace("SHIFT", "0").replace("OTHER", "0")
    lacking = changed.replace("    answer(", "    said['missing'] = np.array(['a.weight', 'b.weight'])\n    answer(")
    with pytest.raises(SystemExit) as end:
        convert.main(["--check", str(folder), "--python", interpreter(tmp_path / "python", lacking)])
    said = capsys.readouterr().out
    assert end.value.code == 1 and "transformers does not find a.weight and 1 others, and draws new numbers" in said


def test_random_tokens_are_none_that_stand_for_images(tmp_path):
    """In their place transformers has another embedding (Gemma 4's padding), or none without an image."""
    folder = whole(tmp_path / "model", "gemma3_images", image_token_id=5, video_token_id=7)
    body = f"json.dump(ids, open({str(tmp_path / 'ids.json')!r}, 'w')); raise RuntimeError('seen')"
    with pytest.raises(ConfigError, match="seen"):
        parity.compare_with_transformers(folder, interpreter(tmp_path / "python", body))
    drawn = {i for row in json.loads((tmp_path / "ids.json").read_text()) for i in row}
    assert not drawn & {5, 7} and {4, 6, 8} <= drawn


def test_exports_in_fp8_are_read_as_their_numbers_and_nvfp4_is_refused(tmp_path):
    """As loaded otherwise, transformers rounds activations to 8 bits too; it has NVFP4 in bfloat16 alone."""
    fp8, nvfp4 = (
        convert.convert(write(tmp_path / f"of_{x}", "llama"), tmp_path / x, dtype=x) for x in ("fp8", "nvfp4")
    )
    body = """
    import types

    class Known(types.SimpleNamespace):
        from_pretrained = staticmethod(lambda folder: Known(**json.load(open(folder + "/config.json"))))

    class Classes:
        _model_mapping = {Known}
        from_pretrained = lambda folder, **how: sys.exit(f"run_compressed={how['quantization_config'].run_compressed}")

    names = {"AutoConfig": Known, "AutoModelForCausalLM": Classes, "AutoTokenizer": None, "__version__": "5.0"}
    fake = types.ModuleType("transformers")
    fake.__dict__.update(names, CompressedTensorsConfig=types.SimpleNamespace)
    sys.modules |= {"transformers": fake, "torch": types.SimpleNamespace(float32=1)}
    script, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
    exec(script)
    """
    with pytest.raises(ConfigError, match=r"transformers cannot compute .*run_compressed=False"):
        parity.compare_with_transformers(fp8, interpreter(tmp_path / "python", body))
    with pytest.raises(ConfigError, match="--check: expected tensors that transformers has in float32, got NVFP4 in "):
        parity.compare_with_transformers(nvfp4, str(tmp_path / "python"))


@pytest.mark.parametrize(
    "body, message",
    [
        ("sys.exit('MISSING torch')", r"--check: expected transformers with torch, got a Python without torch; pip"),
        ("raise RuntimeError('no such kernel')", r"--check: transformers cannot compute .*: RuntimeError: no such"),
    ],
)
def test_what_transformers_cannot_do_is_said_in_one_line(tmp_path, body, message):
    folder = write(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=rf"^{message}[^\n]*$"):
        parity.compare_with_transformers(folder, interpreter(tmp_path / "python", body))
    with pytest.raises(ConfigError, match=r"^--python: expected an interpreter, got .*nowhere' \(No such file"):
        parity.compare_with_transformers(folder, str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"error: --check: expected no --out, got one"):
        convert.main(["--check", str(folder), "--out", "x"])
    with pytest.raises(SystemExit, match=r"error: --check: expected no --dtype, got one"):
        convert.main(["--check", str(folder), "--dtype", "bfloat16"])
    with pytest.raises(SystemExit, match=r"error: --python: expected --check with it, got none; leave it out"):
        convert.main(["--checkpoint", str(folder), "--out", "x", "--python", "python"])
