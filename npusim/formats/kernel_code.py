"""Machine code of kernels: LLVM's text, optimised and compiled for a processor by the package llvmlite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.formats.kernel_translator import ENTRY, translated

if TYPE_CHECKING:
    from types import FunctionType

    from npusim.formats.kernel_parts import ArgumentType


def machine_code(function: FunctionType, kinds: tuple[ArgumentType, ...], cpu: str, features: str) -> bytes:
    """Return a kernel's machine code for arguments of some types, after a line with its name and return type.

    Raises `TranslationError` for a function that is not in the language of kernels.
    """
    import llvmlite.binding as llvm

    text, returns = translated(function, kinds)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = {"cpu": cpu, "features": features, "opt": 3, "codemodel": "jitdefault", "jit": True}
    machine = llvm.Target.from_default_triple().create_target_machine(**processor)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return f"{ENTRY} {'int' if returns else 'none'}\n".encode() + code
