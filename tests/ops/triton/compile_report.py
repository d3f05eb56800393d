"""Compile every kernel for GPUs that need not be here, and report registers, spills and shared memory.

    python tests/ops/triton/compile_report.py [--targets 80,90,100] [--dims 64,128] [--dtypes bf16,fp32]

Triton compiles ahead of time without a GPU; cuobjdump, which ships with it, says what the kernel takes.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_linattn.ops.triton import backward, decode, forward, launch, readout, states

# bytes that a block may have, by compute capability (CUDA programming guide)
SHARED_LIMIT = {cc: size * 1024 for cc, size in {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOATS = ("mu", "nu", "denominator", "delta", "sums", "initial", "final")  # pointers to float32, by how names begin
KERNELS = {
    "forward": (forward.forward_kernel, "values"),
    "key sums": (states.key_sums_kernel, "values"),
    "query sums": (states.query_sums_kernel, "values"),
    "scan": (states.scan_kernel, None),
    "delta": (backward.delta_kernel, None),
    "grad query": (backward.grad_query_kernel, "features"),
    "grad key": (backward.grad_key_kernel, "features"),
    "grad value": (backward.grad_value_kernel, "values"),
    "read": (readout.read_kernel, "values"),
    "grad read": (readout.grad_read_kernel, "features"),
    "decode": (decode.decode_kernel, None),
}


def constants(name, over, dim, dtype, capability, group, map_name):
    """The constexpr arguments that the package would pass, every option on; and the compiler's options."""
    every = {
        "F": dim, "E": dim, "G": group, "MAP": map_name, "PACKED": False, "HAS_MASK": True, "HAS_START": True,
        "HAS_END": True, "NORMALIZE": True, "KEEP_DENOMINATOR": True, "KEEP_END": True, "KEEP_START": True,
        "REVERSE": False, "HAS_INITIAL": True, "KEEP_STARTS": True, "KEEP_FINAL": True, "SHARED": True, "KEYS": False,
        "BLOCK": 1024,
        **launch.products(dtype, dtype),
    }  # fmt: skip
    warps, stages = 4, 1
    if name == "delta":
        every |= {"BT": 32, "BE": dim}
    elif name == "decode":
        every |= {"BF": dim, "BE": decode.value_block(dim, dim)}
    elif over is not None:
        tiles = launch.tiles(over, dim, dim, launch.dot_dtype(dtype, dtype), capability, None, map_name)
        tile = tiles.constants()
        warps = tile.pop("num_warps")
        stages = tile.pop("num_stages")
        every |= tile
    return every, {"num_warps": warps, "num_stages": stages}


def compile_kernel(name, capability, dim, dtype, group=1, map_name="elu1"):
    """What one kernel takes: registers a thread, spilled bytes a thread, shared bytes a block, and its tile."""
    kernel, over = KERNELS[name]
    dtype_name, dtype = dtype, DTYPES[dtype]
    every, options = constants(name, over, dim, dtype, capability, group, map_name)
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    signature, fixed, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        argument = parameter.name
        if parameter.is_constexpr:
            signature[argument], fixed[(index,)] = "constexpr", every[argument]
        elif re.fullmatch("[qkvo]_d", argument):  # contiguous heads
            signature[argument], fixed[(index,)] = "constexpr", 1
        elif argument in ("bounds", "first_segment") and not every["PACKED"]:
            signature[argument], fixed[(index,)] = "constexpr", None
        elif re.fullmatch("[qkvo]_[bth]", argument):
            signature[argument], attributes[(index,)] = "i32", [["tt.divisibility", 16]]
        elif argument.isupper():
            signature[argument] = "i32"
        else:
            kind = "*fp32" if argument.startswith(FLOATS) else element
            kind = {"key_mask": "*u8", "tickets": "*i32", "bounds": "*i64", "first_segment": "*i64"}.get(argument, kind)
            signature[argument], attributes[(index,)] = kind, [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        row = {"kernel": name, "sm": capability, "dim": dim, "dtype": dtype_name, "warps": options["num_warps"]}
        return row | usage(file.name, compiled) | {"limit": SHARED_LIMIT[capability]} | shape(every)


def shape(every):
    return {key: every[key] for key in ("BT", "BF", "BE") if key in every}


def usage(cubin, compiled):
    """What the assembler gave the kernel; what does not fit in registers is spilled to the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    printed = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", printed).group(1)) for what in ("REG", "STACK"))
    return {"registers": registers, "spilled": stack, "shared": compiled.metadata.shared}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="80,90,100")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--map", default="elu1")
    parser.add_argument("--group", type=int, default=1, help="query heads a key head serves")
    parser.add_argument("--json", help="a list of [target, dim, dtype, kernels] instead; prints JSON")
    arguments = parser.parse_args()
    if arguments.json:
        jobs = json.loads(arguments.json)
    else:
        dims, targets = (list(map(int, value.split(","))) for value in (arguments.dims, arguments.targets))
        jobs = [
            (target, dim, dtype, kernel)
            for dtype in arguments.dtypes.split(",")
            for dim in dims
            for kernel in arguments.kernels.split(",")
            for target in targets
        ]
        print(f"{'kernel':12}{'sm':>4}{'D=E':>5} {'dtype':6}{'regs':>5}{'spill':>7}{'shared':>8}{'warps':>6}  tile")
    rows = []
    for target, dim, dtype, kernels in jobs:
        for name in kernels.split(","):
            rows.append(compile_kernel(name, target, dim, dtype, arguments.group, arguments.map))
            if not arguments.json:
                print(line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows))


def line(row):
    tile = " ".join(f"{key}={row[key]}" for key in ("BT", "BF", "BE") if key in row)
    return (
        f"{row['kernel']:12}{row['sm']:>4}{row['dim']:>5} {row['dtype']:6}{row['registers']:>5}{row['spilled']:>7}"
        f"{row['shared']:>8}{row['warps']:>6}  {tile}"
    )


if __name__ == "__main__":
    main()
