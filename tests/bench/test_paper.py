"""The paper's values, for its pairs and for no others."""

import pytest

from dflash_local.bench.paper import paper_value


@pytest.mark.parametrize(
    ("target", "dataset", "temperature", "expected"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "gsm8k", 0.0, (5.15, 6.54)),
        ("qwen3-8b", "humaneval", 1.0, (4.32, 5.52)),
        ("Qwen_Qwen3-4B-Q8_0.gguf", "humaneval", 0.0, (5.21, 6.64)),
        ("Qwen3-Coder-30B-A3B-Instruct-UD-Q4_K_XL.gguf", "humaneval", 0.0, (3.5, 8.09)),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "gsm8k", 0.0, (2.4, 4.32)),
        ("Qwen3-8B-Q4_K_M.gguf", "gsm8k", 0.6, None),
        ("Qwen3-4B-Instruct-2507-Q4_K_M.gguf", "gsm8k", 0.0, None),
        ("DeepSeek-R1-0528-Qwen3-8B-Q4_K_M.gguf", "gsm8k", 0.0, None),
        ("Qwen3-8B-Base-Q8_0.gguf", "gsm8k", 0.0, None),
        ("Qwen3-80B.gguf", "gsm8k", 0.0, None),
        ("Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", "gsm8k", 0.0, None),
        ("tiny-coder-q8_0.gguf", "humaneval", 0.0, None),
    ],
)
def test_the_paper_has_a_value_for_its_pairs_alone(
    target: str, dataset: str, temperature: float, expected: tuple[float, float] | None
) -> None:
    found = paper_value(dataset, target, temperature)
    assert (found and (found.speed_up, found.accepted_length)) == expected
    assert found is None or "2602.06036" in found.source
