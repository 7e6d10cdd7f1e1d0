"""Private names of torch that this package uses: the purpose of each, and the effect if it is missing.

torch may change these names in any release. All of them were found in torch 2.6.0, 2.13.0 and 2.14.1, except where a comment says
otherwise, and ``tests/test_private_names.py`` checks them on the running version. Without a name that has neither a fallback nor
a comment about its absence, ``import actorrpc`` raises an ImportError that shows the name. Attributes of objects are read when
they are used: without them, the use raises an AttributeError.

The path of a call uses the objects of torch themselves, without a function of this package around them. The names that the
drop-in replaces in torch are in :mod:`actorrpc.compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Final

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.autograd import forward_ad as forward_ad
from torch.autograd import profiler as profiler
from torch.autograd import profiler_legacy

from actorrpc._python import find

_find = partial(find, of=f"torch {torch.__version__}")

# -- autograd and futures

# Sets whether this thread records operations for autograd. The fallback is a class in Python, which takes longer.
set_grad_enabled: Final = _find("torch._C:_set_grad_enabled", torch.set_grad_enabled)
# The function that ``torch.autograd.backward`` and ``torch.autograd.grad`` call, after they have spent half of their time.
run_backward: Final = _find("torch.autograd:Variable._execution_engine.run_backward")
# The base class of graph nodes that are written in Python, and the class of such nodes for an autograd function.
PythonNode: Final = _find("torch._C:_FunctionBase")
node_class: Final = attrgetter("_backward_cls")
# The hooks of the leaf of an AccumulateGrad node, and the devices of the gradients that a node takes.
leaf_hooks: Final = attrgetter("variable._backward_hooks")
input_metadata: Final = attrgetter("_input_metadata")
# Objects of this thread, and of the threads of the engine that work for it: whether there is one, get it, set it, and remove it.
# torch 2.6 cannot remove an object: it stays, and is set to False.
has_local: Final[Callable[[str], bool]] = _find("torch._C:_is_key_in_tls")
get_local: Final[Callable[[str], bool]] = _find("torch._C:_get_obj_in_tls")
set_local: Final = _find("torch._C:_stash_obj_in_tls")
remove_local: Final = _find("torch._C:_remove_obj_from_tls", None)
# How many tensors and storages use memory. Without it, gradients, and large results of actors, are always copied.
use_count: Final = _find("torch._C:_storage_Use_Count", None)
# The number of references to the C++ object of a tensor: one for all references in Python together, and one more for each view,
# DLPack capsule and node of a graph that uses the tensor.
tensor_use_count: Final = _find("torch:Tensor._use_count", None)
# The base class of ``torch.futures.Future``, of which torch's ``then`` and ``collect_all`` return objects. ``set_unwrap`` sets a
# function, which torch calls with the result of a future when it reads the result (``wait``, ``value``, ``wait_all``).
NativeFuture: Final[Any] = _find("torch._C:Future")
set_unwrap: Final = _find("torch._C:Future._set_unwrap_func")

# -- tensors and operators

dispatch_keys: Final = _find("torch._C:_dispatch_keys")  # tensors with equal keys are of one kind
# Set the bits that say whether the elements of a tensor in memory are conjugate or negative.
set_conj: Final = _find("torch._C:_set_conj")
set_neg: Final = _find("torch._C:_set_neg")
is_zerotensor: Final = _find("torch:Tensor._is_zerotensor")  # such a tensor has no memory
# The parts of a sparse tensor. The public methods raise an error if the tensor is not coalesced.
sparse_indices: Final = _find("torch:Tensor._indices")
sparse_values: Final = _find("torch:Tensor._values")
MKLDNN: Final = _find("torch:_mkldnn")  # the layout of oneDNN
untyped: Final = attrgetter("_untyped_storage")  # ``TypedStorage.untyped()`` without its warning
# A class of torch's compiler whose objects compare a tensor with an example. Without it, small tensors are not sent in stacks.
TensorGuards: Final = _find("torch._C:_dynamo.guards.TensorGuards", None)
# How many modes change the tensors that this thread makes; the innermost transform that does; whether a transform made a tensor.
dispatch_modes: Final = _find("torch._C:_len_torch_dispatch_stack")
function_modes: Final = _find("torch._C:_len_torch_function_stack")
innermost_transform: Final = _find("torch._C:_functorch.peek_interpreter_stack")
is_transformed: Final = _find("torch._C:_functorch.is_functorch_wrapped_tensor")
# Contexts without ``__torch_function__``: the first ignores modes and methods of subclasses, the second only the methods.
NoFunctionModes: Final = _find("torch._C:DisableTorchFunction")
NoFunctionMethods: Final = _find("torch._C:DisableTorchFunctionSubclass")
# The class of custom operators, the operators of this process by name, and the arguments with which an operator was made.
CustomOpDef: Final = _find("torch._library.custom_ops:CustomOpDef")
custom_operators: Final = _find("torch._library.custom_ops:OPDEFS")
custom_operator_parts: Final = attrgetter(
    *("_qualname", "_schema", "_init_fn", "_backend_fns", "_abstract_fn", "_vmap_fn", "_backward_fn"),
    *("_setup_context_fn", "_torch_dispatch_fns"),
)
# More arguments, read with a default: torch 2.6 has neither tags nor rules for autocast.
OPERATOR_TAGS: Final = "_tags"
OPERATOR_AUTOCAST: Final = "_autocast_dtype"
overload_name: Final = attrgetter("_schema.name", "_overloadname")
packet_name: Final = attrgetter("_qualified_op_name")
# Attributes of functions that ``torch.compile`` or ``torch.compiler.disable`` has made: the id of the function, which torch 2.6
# does not set, and the original function. Without the id, such functions are sent as other functions are, by their code.
WRAPPER_ID: Final = "_torchdynamo_wrapper_id"
WRAPPED: Final = "_torchdynamo_orig_callable"

# -- memory of CUDA devices that processes share

# Open memory of another process. Without it, messages send CUDA tensors through host memory, and actorrpc.share() refuses them.
import_storage: Final = _find("torch:UntypedStorage._new_shared_cuda", None)

# -- profilers

thread_is_profiled: Final = _find("torch.autograd:_profiler_enabled")
# The kind of profiler of this thread, and the enum of all kinds.
profiler_type: Final = _find("torch._C._autograd:_profiler_type")
ActiveProfilerType: Final = _find("torch._C._profiler:ActiveProfilerType")
# Begin a range, and end it when a NativeFuture completes. Without them, profiles have no ranges for calls.
begin_range: Final = _find("torch:ops.profiler._record_function_enter_new", None)
end_range_with: Final = _find("torch:ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction", None)
# Start and end the old profiler, make events of its records, and nest events.
enable_legacy: Final = _find("torch.autograd:_enable_profiler_legacy")
disable_legacy: Final = _find("torch.autograd:_disable_profiler_legacy")
parse_legacy: Final = _find("torch.autograd.profiler_legacy:_parse_legacy_records")
build_tree: Final = methodcaller("_build_tree")
# The functions that end a profile; :mod:`actorrpc.rpc.profiling` replaces them.
PROFILE_ENDS: Final = ((profiler, "_disable_profiler"), (profiler_legacy, "_disable_profiler_legacy"))
# Returns the name of a builtin operator, or None for other functions. Without it, profiles show the Python names of operators.
find_builtin: Final = _find("torch.jit._builtins:_find_builtin", lambda _: None)
# The module in C of torch's own RPC (None: torch was built without it), and its function that sets the rank in profiled events.
distributed_rpc: Final = _find("torch._C:_distributed_rpc", None)
set_profiler_rank: Final[Any] = getattr(distributed_rpc, "_set_profiler_node_id", lambda _: None)

# -- modules and optimizers

RemoteDevice: Final = _find("torch.distributed.remote_device:_remote_device")
parse_to: Final = _find("torch._C:_nn._parse_to")  # reads the arguments of ``Module.to``
state_dict_hooks: Final = attrgetter("_load_state_dict_pre_hooks")
tensor_mapper: Final = attrgetter("_apply")  # a method that replaces each tensor by the result of a function
METADATA: Final = "_metadata"  # of a state dict, read with a default: the versions of modules
# The hooks of all optimizers, and of one optimizer, before and after a step.
global_step_hooks: Final = (
    _find("torch.optim.optimizer:_global_optimizer_pre_hooks"),
    _find("torch.optim.optimizer:_global_optimizer_post_hooks"),
)
step_hooks: Final = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# The module that torch imports when a process makes its first optimizer. Without it, a fork server cannot preload torch.optim.
LATE_MODULE: Final = "torch._dynamo"

# -- process groups: what ``init_process_group`` calls, for groups without a default group

world_of: Final = attrgetter("_world")  # of the module ``distributed_c10d``: its tables of groups
enter_group: Final = _find("torch._C._distributed_c10d:_register_process_group")
# The options of gloo: the class in ``ProcessGroupGloo``, and two attributes. The options of NCCL have the first attribute, too.
gloo_options: Final = attrgetter("_Options")
TIMEOUT: Final = "_timeout"
DEVICES: Final = "_devices"
set_default_timeout: Final = attrgetter("_set_default_timeout")
# The methods of a ProcessGroup that set its default backend, its backend for a device, its name and its description.
setters: Final = attrgetter("_set_default_backend", "_register_backend", "_set_group_name", "_set_group_desc")

# Names that are in other modules of this package, too, by the object that has them.
IN_PLACE: Final[Mapping[Any, tuple[str, ...]]] = {
    # Variables of modules, which change: whether a profiler is on in any thread, and the level of forward-mode derivatives.
    profiler: ("_is_profiler_enabled",),
    forward_ad: ("_current_level",),
    # A number that no other storage has. A function would take longer to read it for each tensor.
    torch.UntypedStorage: ("_cdata",),
    # Methods that RemoteModule overrides.
    torch.nn.Module: ("_save_to_state_dict", "_load_from_state_dict", "_replicate_for_data_parallel"),
}
