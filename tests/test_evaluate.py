"""Scores, questions, and the interface of the LM Evaluation Harness."""

import dataclasses
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from commands import evaluate
from small import CONFIG, drawn_params, plain_logits

from surojax import ConfigError
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference.prompts import complete
from surojax.inference.score import Request, Score, _scorer, request_of, score
from surojax.inference.trained_model import Trained
from surojax.models import decoder_model
from surojax.models.model import Compute
from surojax.training import evaluation

MODEL = decoder_model.build(CONFIG)


def ids_of(*sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(CONFIG.vocab_size, size=size, dtype=np.int32) for size in sizes]


def plain_logprobs(params, ids: np.ndarray, config=CONFIG) -> np.ndarray:
    """Of every next token `[S, V]`."""
    logits = plain_logits(config, params, ids, length=16).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_scores_are_those_of_the_plain_model():
    """Of lengths that are padded differently, in two batches, in the order asked for (1e-5: order of float32 sums)."""
    params = drawn_params(CONFIG, 1, times=3)
    contexts = ids_of(5, 1, 9, 3, 2)
    requests = [Request(context, more) for context, more in zip(contexts, ids_of(2, 4, 1, 6, 3), strict=True)]
    greedy = int(np.argmax(plain_logprobs(params, contexts[3])[-1]))
    requests[3] = Request(contexts[3], np.array([greedy], np.int32))
    found = score(MODEL, params, requests, batch_size=3, multiple_of=8)
    for (context, continuation), (logprob, is_greedy) in zip(requests, found, strict=True):
        logprobs = plain_logprobs(params, np.concatenate([context, continuation]))[context.size - 1 : -1]
        np.testing.assert_allclose(logprob, logprobs[np.arange(continuation.size), continuation].sum(), atol=1e-4)
        assert is_greedy == bool((logprobs.argmax(-1) == continuation).all())
    assert [result.is_greedy for result in found] == [False, False, False, True, False]


@pytest.mark.full
def test_logits_of_long_texts_are_computed_in_slices():
    params = drawn_params(CONFIG, 1)
    (text,) = ids_of(300)
    (whole,) = score(MODEL, params, [Request(text[:1], text[1:])], batch_size=1, multiple_of=256)  # two slices
    (again,) = score(MODEL, params, [Request(text[:1], text[1:])], batch_size=1, multiple_of=1)  # 299 tokens at once
    logprobs = plain_logprobs(params, text)[:-1]
    expected = logprobs[np.arange(299), text[1:]].sum()
    np.testing.assert_allclose([whole.logprob, again.logprob], expected, rtol=1e-5)


def test_no_batch_has_all_logits_at_once():
    """Three rows of 101 tokens, no multiple of a slice; and a greedy answer stays one beside the padding."""
    program = _scorer(MODEL)
    targets_BS = np.full((3, 101), -1, np.int32)
    arguments = (drawn_params(CONFIG, 1), np.zeros((3, 101), np.int32), targets_BS)
    text = program.lower(*arguments).as_text()
    assert f"tensor<256x{CONFIG.vocab_size}x" in text and f"tensor<303x{CONFIG.vocab_size}x" not in text
    logprob_B, is_greedy_B = program(*arguments)
    assert not logprob_B.any() and is_greedy_B.all()


@pytest.mark.parametrize("attention", ["cudnn", "mosaic"])
def test_a_run_with_an_attention_of_gpus_is_scored_anywhere(attention):
    trained = MODEL.rebuild(Compute(attention=attention))
    params = drawn_params(CONFIG, 1)
    requests = [Request(*ids_of(5, 3))]
    assert score(trained, params, requests, multiple_of=8) == score(MODEL, params, requests, multiple_of=8)


def test_empty_requests_are_refused():
    for sizes in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match="at least one token, got {} and {}".format(*sizes)):
            score(MODEL, {}, [Request(*ids_of(*sizes))])


class Merging(ByteTokenizer):
    """Bytes, but "ab" is one token, 300."""

    def encode(self, text: str) -> np.ndarray:
        merged = np.frombuffer(text.encode().replace(b"ab", b"\x00"), np.uint8).astype(np.int32)
        return np.where(merged == 0, 300, merged)


def test_pairs_merge_no_token_across_the_seam():
    words = Merging()
    context, continuation = request_of(words, "xa", "bc")
    assert context.tolist() == [*b"xa"] and continuation.tolist() == [*b"bc"]
    context, continuation = request_of(words, "x ", "abc")
    assert context.tolist() == [*b"x"] and continuation.tolist() == [32, 300, *b"c"]
    context, continuation = request_of(words, "x  ", "abc")
    assert context.tolist() == [*b"x"] and continuation.tolist() == [32, 32, 300, *b"c"]
    context, continuation = request_of(words, "", "ab")
    assert context.tolist() == [words.eos_id] and continuation.tolist() == [300]
    words.bos_id, words.adds_bos = 7, False  # a first token that only texts without a context begin with
    assert request_of(words, "x", "y").context.tolist() == [*b"x"]
    assert request_of(words, "", "y").context.tolist() == [7]
    words.adds_bos = True
    assert request_of(words, "x", "y").context.tolist() == [7, *b"x"]


def test_questions_are_answered_by_likelihood(tmp_path, monkeypatch):
    """Two-byte letters make the longer choice win per byte, not per letter."""
    file = tmp_path / "questions.jsonl"
    rows = [("one", ["aa", "éé"], 1), ("two", ["b", "c"], 1)]
    keys = ("question", "choices", "answer")
    file.write_text("\n\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    questions = evaluate.read_questions(file)
    assert [tuple(question) for question in questions] == [(q, tuple(c), a) for q, c, a in rows]
    logprobs = {" aa": -2.0, " éé": -3.0, " b": -1.0, " c": -0.5}

    def scores(model, weights, requests, *, batch_size):
        texts = [bytes(request.continuation.tolist()).decode() for request in requests]
        return [Score(logprobs[text], False) for text in texts]

    monkeypatch.setattr(evaluate, "score", scores)
    found = evaluate.answer(Trained(MODEL, {}, ByteTokenizer(), None), questions)
    assert found == (0.5, 1.0, 2)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected at least one question in .*, got none"),
        ("{", r":1: expected .*, got a line that is no JSON"),
        ('{"question": "x"}', r":1: expected .*, got '"),
        ('["question", "choices", "answer"]', r":1: expected .*, got '"),
        ('{"question": 5, "choices": ["y", "z"], "answer": 0}', r":1: expected .*two choices or more"),
        ('{"question": "x", "choices": "yz", "answer": 0}', r":1: expected .*two choices or more"),
        ('{"question": "x", "choices": ["y", ""], "answer": 0}', r":1: expected .*two choices or more"),
        ('{"question": "x", "choices": ["y", "z"], "answer": true}', r":1: expected .*index below 2, got True"),
        ('{"question": "x", "choices": ["y", "z"], "answer": -1}', r":1: expected .*index below 2, got -1"),
        ('\n{"question": "x", "choices": ["y"], "answer": 0}', r":2: expected .*two choices or more"),
        ('{"question": "x", "choices": ["y", 3], "answer": 0}', r":1: expected .*two choices or more"),
        (r'{"question": "x", "choices": ["y", "\ud800"], "answer": 0}', r":1: expected .* in UTF-8, got one half of a"),
        ('{"question": "x", "choices": ["y", "z"], "answer": 2}', r":1: expected .*index below 2, got 2"),
    ],
)
def test_bad_questions_are_refused(tmp_path, text, message):
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        evaluate.read_questions(file)
    with pytest.raises(ConfigError, match="--questions: cannot read"):
        evaluate.read_questions(tmp_path / "nowhere")


def test_a_wrong_command_line_is_one_line():
    for given in ([], ["--checkpoint", "x"], ["--checkpoint", "x", "--questions", "y", "--nonsense"]):
        with pytest.raises(SystemExit, match=r"^surojax\.evaluate: error: [^\n]*; see --help$"):
            evaluate.main(given)


@pytest.mark.parametrize(
    "options",
    ["--max-length 9", "--num-fewshot 0", "--chat", "--chat-template chatml", "--include-path x"],
)
def test_options_of_tasks_are_refused_beside_questions(options):
    name = options.split()[0]
    message = rf"error: --questions: expected no {name}, which is for --tasks, got one; leave it out$"
    with pytest.raises(SystemExit, match=message):
        evaluate.main(["--checkpoint", "x", "--questions", "y", *options.split()])


def test_results_that_cannot_be_written_are_refused_first(tmp_path):
    for file in (tmp_path, tmp_path / "no" / "folder" / "x.json"):
        with pytest.raises(SystemExit, match=r"error: --json: expected a file that can be written, got .*; choose"):
            evaluate.main(["--checkpoint", "x", "--questions", "y", "--json", str(file)])


def test_a_template_without_chat_is_refused():
    with pytest.raises(SystemExit, match=r"error: --chat-template: expected --chat with it, got none; add it$"):
        evaluate.main(["--checkpoint", "x", "--tasks", "y", "--chat-template", "chatml"])


TASK = """
task: toy
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture
def harness_module(monkeypatch, tmp_path):
    """`inference.harness`, without the warnings of lm_eval's import; skipped without that package."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval")
        from surojax.inference import harness
    return harness


def test_what_a_task_wants_generated(harness_module):
    """An empty stop string stops nothing; more tokens than fit are refused; a prompt keeps its end."""
    harness = harness_module.Harness(Trained(MODEL, {}, ByteTokenizer(), None), batch_size=2, max_length=16)
    prompt, options, until = harness._prepared(("x" * 40, {"until": ["", "stop"], "max_gen_toks": 12}))
    assert (len(prompt), options["max_tokens"], until) == (4, 12, ("stop",))
    for nothing in ("", None):
        assert harness._prepared(("x", {"until": nothing, "max_gen_toks": 1}))[2] == ()
    sampled = {"temperature": 0.7, "top_p": 0.9, "max_gen_toks": 1}
    for do_sample, temperature in ((True, 0.7), (False, 0.0)):
        options = harness._prepared(("x", sampled | {"do_sample": do_sample}))[1]
        assert options == {"max_tokens": 1, "temperature": temperature, "top_p": 0.9}
    assert harness._prepared(("x", sampled))[1]["temperature"] == 0.7
    message = r"^--max-length: expected more than the 16 tokens that a task wants generated, got 16; raise it$"
    with pytest.raises(ConfigError, match=message):
        harness._prepared(("x", {"max_gen_toks": 16}))


def test_texts_of_tasks_begin_once(harness_module):
    """With the token that the tokenizer adds, unless a task wants none or its text has it; else with nothing."""
    words = ByteTokenizer()
    harness = harness_module.Harness(Trained(MODEL, {}, words, None), batch_size=2, max_length=16)
    for bos, adds, begins in ((7, True, True), (7, False, False), (None, True, False)):
        words.bos_id, words.adds_bos = bos, adds
        assert harness.tok_encode("ab") == [7] * begins + [97, 98]
        assert harness.tok_encode("ab", add_special_tokens=False) == [97, 98]
        assert harness.tok_encode("\x07b") == [7, 98]
        assert harness.prefix_token_id == (words.eos_id if bos is None else bos)


def test_requests_with_different_options_share_no_batch(monkeypatch, harness_module):
    """However stop strings, options and lengths are mixed: every text is continued once, with its own, in its place."""
    words = ByteTokenizer()
    sizes = []

    def upper(model, weights, prompts, *, max_tokens, temperature, top_p, ended, **_):
        """In place of a model: the prompt in capitals, then its options, up to a stop string."""
        sizes.append(len(prompts))
        continued = []
        for prompt in prompts:
            ids = words.encode(f"{words.decode(prompt).upper()}{max_tokens} {temperature} {top_p}.;,").tolist()
            ends = [size for size in range(len(ids)) if ended(ids[:size])]
            continued.append(ids[: ends[0] if ends else None])
        return continued

    monkeypatch.setattr(harness_module, "generate_batch", upper)
    options = [
        {"max_gen_toks": size, "temperature": temperature, "top_p": top_p}
        for size in (3, 12)
        for temperature in (0.0, -0.0, 0.7)  # equal ones, and others
        for top_p in (0.5, 1.0)
    ]
    stops = [[";"], [","], [";", ","], ";", []]
    mixed = [(option, until) for until in stops for option in options]
    order = np.random.default_rng(0).permutation(2 * len(mixed))
    asked = [
        SimpleNamespace(args=("x" * (i % 7 + 1), mixed[i % len(mixed)][0] | {"until": mixed[i % len(mixed)][1]}))
        for i in order
    ]
    for batch_size in (1, 3, 4, 200):
        sizes.clear()
        harness = harness_module.Harness(Trained(MODEL, {}, words, None), batch_size=batch_size, max_length=64)
        found = harness.generate_until(asked, disable_tqdm=True)
        for request, text in zip(asked, found, strict=True):
            prompt, wanted = request.args
            whole = f"{prompt.upper()}{wanted['max_gen_toks']} {wanted['temperature']} {wanted['top_p']}.;,"
            ends = [whole.index(stop) for stop in wanted["until"]]
            assert text == whole[: min(ends, default=None)]
        assert sum(sizes) == len(asked) and max(sizes) == min(batch_size, 4)


@pytest.mark.full
def test_the_harness(tmp_path, harness_module):
    """A task of its own runs, and finds what `answer` finds; texts are continued up to a stop string."""
    words = ByteTokenizer()
    config = dataclasses.replace(CONFIG, vocab_size=320)
    model = decoder_model.build(config)
    params = drawn_params(config, 1, times=3)
    trained = Trained(model, params, words, None)
    rng = np.random.default_rng(3)
    letters = lambda size: "".join(chr(c) for c in rng.integers(97, 123, size))
    rows = [{"question": letters(9), "choices": [letters(n) for n in (3, 5, 4)], "answer": i % 3} for i in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "toy.yaml").write_text(TASK.replace("QUESTIONS", str(tmp_path / "questions.jsonl")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = evaluate.run_harness(
            trained, "toy", batch_size=4, max_length=64, include_path=str(tmp_path), bootstrap_iters=0
        )["toy"]
        with pytest.raises(ConfigError, match=r"^--tasks: lm_eval could not run nonsense"):
            evaluate.run_harness(trained, "nonsense", batch_size=4, max_length=64)
    expected = evaluate.answer(trained, evaluate.read_questions(tmp_path / "questions.jsonl"))
    assert 0 < expected.plain < 1 and (found["acc,none"], found["acc_norm,none"], 12) == expected

    harness = harness_module.Harness(trained, batch_size=2, max_length=64)
    prompts = ["abc", "x", "hello there"]
    greedy = [complete(trained, prompt, max_tokens=12, temperature=0) for prompt in prompts]
    stop = greedy[0][3:5]
    asked = [SimpleNamespace(args=(prompt, {"until": [stop], "max_gen_toks": 12})) for prompt in prompts]
    assert harness.generate_until(asked, disable_tqdm=True) == [text.split(stop)[0] for text in greedy]
    text = SimpleNamespace(args=("some text that is longer than the window" * 3,))
    (rolling,) = harness.loglikelihood_rolling([text], disable_tqdm=True)
    ids = np.array([words.eos_id, *text.args[0].encode()])
    first, last = ids[:65], ids[-65:]  # the tokens after the first window are scored with as much context as fits
    total = plain_logprobs(params, first[:-1], config)[np.arange(64), first[1:]].sum()
    total += plain_logprobs(params, last[:-1], config)[np.arange(64), last[1:]][65 - ids.size :].sum()
    np.testing.assert_allclose(rolling, total, rtol=1e-5)


@pytest.mark.parametrize("bytes_per_label, bits", [(None, None), (4.0, 3.0 / np.log(2) / 4)])
def test_bits_per_byte_of_held_out_text(bytes_per_label, bits, monkeypatch):
    """The mean over all labels, in bits, of the bytes that a label stands for; other means beside it."""
    batches = [({"loss": 6.0, "other": 1.0}, 2), ({"loss": 6.0, "other": 2.0}, 2)]
    monkeypatch.setattr(evaluation.train_step, "evaluated", lambda *_: iter(batches))
    found = object.__new__(evaluation.Evaluation)
    found.arrays, found.sharding, found.step, found.terms = (), None, None, "tokens"
    one = SimpleNamespace(name="held", batches=[], bytes_per_label=bytes_per_label)
    scores = found.scores({}, one)  # type: ignore[arg-type]
    assert (scores["name"], scores["loss"], scores["others"]) == ("held", 3.0, {"other": 0.75})
    assert scores["bits_per_byte"] == (bits and pytest.approx(bits))
