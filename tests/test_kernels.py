from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from autoplan.profiler.operations.inputs import InputFactory  # noqa: E402
from autoplan.profiler.operations.kernels import KERNELS, build, implementation, implementation_windowed  # noqa: E402
from autoplan.spec.operations import Operation  # noqa: E402

CPU = torch.device("cpu")
SHAPE = {
    "gemm": (48, 32, 16),
    "dgrad": (48, 32, 16),
    "wgrad": (48, 32, 16),
    "attention": (2, 64, 4, 2, 16, 0),
    "attention_backward": (2, 64, 4, 2, 16, 0),
    "latent_attention": (2, 64, 4, 24, 16),
    "latent_attention_backward": (2, 64, 4, 24, 16),
    "experts": (64, 32, 48, 2, 8, 1, 2),
    "experts_backward": (64, 32, 48, 2, 8, 1, 2),
    "norm": (48, 32),
    "norm_backward": (48, 32),
    "rope": (48, 4, 16),
    "swiglu": (48, 32),
    "swiglu_backward": (48, 32),
    "cross_entropy": (48, 100),
    "optimizer": (1000,),
    "copy_to_host": (1000,),
    "copy_from_host": (1000,),
}


def flops(operation: Operation, dtype: str = "fp32") -> float:
    """Operations of the products that one call really runs, as torch counts them."""
    kernel = implementation(operation, dtype, CPU)
    # torch counts a product that is written to a place as none, and knows no grouped one.
    if kernel == "addmm":
        kernel = "mm + add"
    if kernel == "grouped_mm":
        kernel = "mm each"
    run = build(operation, SHAPE[operation], InputFactory(device=CPU, dtype=dtype, kernel=kernel), cache_bytes=0)
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def test_every_operation_of_one_device_runs_here() -> None:
    assert set(SHAPE) == KERNELS
    for operation in KERNELS:
        assert implementation(operation, "fp32", CPU)
        assert implementation(operation, "bf16", CPU)


def test_products_compute_what_their_shape_says() -> None:
    m, n, k = SHAPE["wgrad"]
    assert flops("wgrad") == 2 * m * n * k
    assert flops("wgrad", "bf16") == 2 * m * n * k
    factory = InputFactory(device=CPU, dtype="fp32", kernel="mm")
    forward, backward = (build(operation, (m, n, k), factory)() for operation in ("gemm", "dgrad"))
    assert forward.shape == (m, n)
    assert backward.shape == (m, k)


def test_experts_compute_the_tokens_that_come_to_one_rank() -> None:
    tokens, hidden_size, ffn_size, per_token, num_experts, _, ep = SHAPE["experts"]
    each, local = tokens * per_token // num_experts, num_experts // ep
    forward = 2 * each * local * hidden_size * 3 * ffn_size
    assert flops("experts") == forward
    assert flops("experts_backward") == 2 * forward


def test_every_expert_gets_whole_rows_of_16_bytes() -> None:
    tokens, hidden_size, ffn_size, per_token, num_experts, ep = 100, 32, 48, 2, 8, 2
    factory = InputFactory(device=CPU, dtype="bf16", kernel="grouped_mm")
    out: Any = build("experts", (tokens, hidden_size, ffn_size, per_token, num_experts, 1, ep), factory)()
    assert out.shape == (num_experts // ep * 24, hidden_size)  # 25 would be theirs
    out = build("experts", (4, hidden_size, ffn_size, 1, num_experts, 1, ep), factory)()
    assert out.shape == (num_experts // ep * 8, hidden_size)


def test_products_in_8_bits_compute_what_their_shape_says() -> None:
    m, n, k = shape = 48, 32, 16
    shapes: dict[Operation, tuple[int, int]] = {"gemm": (m, n), "dgrad": (m, k), "wgrad": (n, k)}
    for operation, wanted in shapes.items():
        kernel = implementation(operation, "fp8", CPU)
        out: Any = build(operation, shape, InputFactory(device=CPU, dtype="fp8", kernel=kernel))()
        assert out.shape == wanted
        assert out.isfinite().all()


def test_attention_and_its_backward_pass_run_flash_kernels() -> None:
    batch, seq_len, heads, kv_heads, head_dim, _ = SHAPE["attention"]
    kernel = implementation("attention", "fp32", CPU)
    assert kernel == "sdpa flash"
    factory = InputFactory(device=CPU, dtype="fp32", kernel=kernel)
    out: Any = build("attention", SHAPE["attention"], factory)()
    assert out.shape == (batch, heads, seq_len, head_dim)
    assert "Flash" in type(out.grad_fn).__name__
    gradients: Any = build("attention_backward", SHAPE["attention"], factory)()
    assert [gradient.shape[1] for gradient in gradients] == [heads, kv_heads, kv_heads]


def test_the_optimizer_moves_its_weights() -> None:
    steps: list[object] = []
    for dtype in ("fp32", "bf16"):
        run = build("optimizer", (1000,), InputFactory(device=CPU, dtype=dtype, kernel="torch"), cache_bytes=0)
        steps.append(run())
    assert steps == [None, None]


def test_sets_of_inputs_take_turns() -> None:
    """A kernel that is called again finds other inputs, so that the cache holds the first no more."""
    factory = InputFactory(device=CPU, dtype="fp32", kernel="torch")
    one_set, sets = (build("norm", (64, 32), factory, cache_bytes=size) for size in (0, 2 * 64 * 32 * 4))
    torch.manual_seed(0)
    assert torch.equal(one_set(), one_set())  # type: ignore[arg-type]
    assert not torch.equal(sets(), sets())  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_query_sees_the_last_tokens_of_its_window(window: int) -> None:
    kernel = implementation_windowed("attention", "fp32", CPU)
    assert kernel == "sdpa mask"
    assert implementation_windowed("gemm", "fp32", CPU) == ""
    factory = InputFactory(device=CPU, dtype="fp32", kernel=kernel)
    torch.manual_seed(0)
    out: Any = build("attention", (1, 64, 4, 2, 16, window), factory, cache_bytes=0)()
    torch.manual_seed(0)
    q, k, v = (factory.normal(1, 64, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    ages = torch.arange(64)[:, None] - torch.arange(64)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 16**0.5).masked_fill((ages < 0) | (ages >= window), -1e9)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
    gradients: Any = build("attention_backward", (1, 64, 4, 2, 16, window), factory, cache_bytes=0)()
    assert [gradient.shape[1] for gradient in gradients] == [4, 2, 2]


def test_latent_attention_has_values_narrower_than_keys() -> None:
    batch, seq_len, heads, qk_head_dim, v_head_dim = SHAPE["latent_attention"]
    factory = InputFactory(device=CPU, dtype="fp32", kernel=implementation("latent_attention", "fp32", CPU))
    out: Any = build("latent_attention", SHAPE["latent_attention"], factory)()
    assert out.shape == (batch, heads, seq_len, v_head_dim)
    gradients: Any = build("latent_attention_backward", SHAPE["latent_attention"], factory)()
    assert [gradient.shape[-1] for gradient in gradients] == [qk_head_dim, qk_head_dim, v_head_dim]


def test_what_no_device_of_this_kind_can_run_has_no_name() -> None:
    assert implementation("attention", "fp8", CPU) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("operation", sorted(KERNELS))
def test_kernels_run_on_a_gpu(operation: Operation, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    kernel = implementation(operation, dtype, device)
    if dtype == "bf16" and torch.cuda.get_device_capability() >= (8, 0):
        assert kernel
    if operation == "wgrad" and dtype == "bf16":
        assert kernel == "addmm fp32"
    if windowed := implementation_windowed(operation, dtype, device):
        from torch.nn.attention import varlen

        # That of torch 2.11 takes no window.
        packs = "window_size" in inspect.signature(varlen.varlen_attn).parameters and dtype != "fp32"
        assert windowed == ("varlen flash" if packs else "sdpa mask")
        factory = InputFactory(device=device, dtype=dtype, kernel=windowed)
        build(operation, (2, 256, 8, 2, 64, 100), factory)()
    if kernel:
        shapes = {**SHAPE, "attention": (2, 256, 8, 2, 64, 0), "attention_backward": (2, 256, 8, 2, 64, 0)}
        build(operation, shapes[operation], InputFactory(device=device, dtype=dtype, kernel=kernel))()
        torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [128, 256, 200])
@pytest.mark.parametrize("is_weight", [False, True])
def test_narrow_operands_have_the_scales_that_torch_demands(rows: int, is_weight: bool) -> None:
    """As aten/src/ATen/native/cuda/ScaledBlas.cpp tells the kinds apart, which no CPU runs."""
    depth, tiles = 1024, math.ceil(rows / 128)

    def made(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        return InputFactory(device=CPU, dtype=dtype).narrow(rows, depth, is_weight=is_weight)

    numbers, scale = made("fp8")
    assert (numbers.dtype, numbers.shape, scale.numel()) == (torch.float8_e4m3fn, (rows, depth), 1)
    numbers, scale = made("mxfp8")
    assert (numbers.shape, scale.dtype) == ((rows, depth), torch.float8_e8m0fnu)
    assert scale.numel() == tiles * 128 * depth // 32
    numbers, scale = made("nvfp4")  # two numbers a byte
    assert (numbers.dtype, numbers.shape) == (torch.float4_e2m1fn_x2, (rows, depth // 2))
    assert (scale.dtype, scale.numel()) == (torch.float8_e4m3fn, tiles * 128 * depth // 16)
    numbers, scale = made("fp8_block")
    expected = ((tiles, 8), (8, 1)) if is_weight else ((rows, 8), (1, rows))
    assert (scale.shape, scale.stride(), scale.dtype) == (*expected, torch.float32)


def test_what_this_device_does_not_multiply_is_left_out() -> None:
    assert implementation("gemm", "fp8", CPU) == "scaled_mm"
    for dtype in ("mxfp8", "nvfp4", "fp8_block"):
        assert implementation("gemm", dtype, CPU) == ""  # tried, and refused by torch
        assert implementation("norm", dtype, CPU) == ""
