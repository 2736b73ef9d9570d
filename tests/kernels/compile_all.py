"""Compile every kernel for an H100/H200 (sm_90), which takes no GPU.

Run by test_statistics_triton in a process of its own, without the interpreter.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from dllm.kernels.rotation import triton as rotation
from dllm.kernels.statistics import tiles

TARGET, SHARED = GPUTarget("cuda", 90, 32), 227 * 1024
HALF = ("q_ptr", "k_ptr", "v_ptr", "kept_k_ptr", "kept_v_ptr", "out_ptr")
HALF += ("w_ptr", "x_ptr", "bias_ptr")
POINTERS = dict.fromkeys(HALF, "*bf16") | {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
POINTERS |= {"banned_rows_ptr": "*u8"}
FLOATS = {"sums_ptr", "sums_out", "numbers_out", "top_logprob_out"}
ALIGNED = {"depth", "x_stride", "w_stride", "size", "q_stride", "k_stride"}


def kind(name: str) -> str:
    if name in POINTERS:
        return POINTERS[name]
    if name in FLOATS:
        return "*fp32"
    if name.endswith(("_ptr", "_out")):
        return "*i64"
    return "fp32" if name in ("scale", "temperature") else "i32"


def build(kernel: Any, options: dict[str, int], **constants: Any) -> None:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kind(n) for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in constants and (n in ALIGNED or signature[n].startswith("*"))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    done = compile(source, target=TARGET, options=options)
    assert done.metadata.shared <= SHARED, (kernel, constants, done.metadata.shared)
    print("compiled", kernel.__name__, constants, done.metadata.shared)


def main() -> None:
    base = {"HAS_BIAS": False, "BANNED_ROWS": True, "SELECT": True, "WIDE": False,
            "BLOCK_V": 128, "BLOCK_D": 64}  # fmt: skip
    for fused, rows, noise_, warm, top in [
        (True, 16, False, False, 0), (True, 32, True, False, 4), (True, 128, False, False, 0),
        (True, 128, False, True, 16), (False, 32, True, True, 16),
    ]:  # fmt: skip
        build(
            tiles.partials, {"num_warps": 8 if rows >= 64 else 4, "num_stages": 4},
            FUSED=fused, NOISE=noise_, WARM=warm, TOP=top, BLOCK_R=rows, **base,
        )  # fmt: skip
    sizes = {"BLOCK_R": 1, "BLOCK_S": 256}
    build(tiles.merge, {}, NOISE=True, WARM=True, TOP=4, BLOCK_T=1024, **sizes)
    build(tiles.merge, {}, NOISE=False, WARM=False, TOP=0, BLOCK_T=256, **sizes)
    build(rotation._rotate_scatter, {"num_warps": 1}, BLOCK=64)


if __name__ == "__main__":
    main()
