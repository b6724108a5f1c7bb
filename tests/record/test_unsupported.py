"""Ways of training that spread a model over processes are refused by name, before anything is recorded."""

import pytest
import torch
from torch import distributed, nn

import dualform
from dualform.errors import RecordingError
from training import sgd

NOT_RECORDED = r"not recorded yet \({}\)\. Train the plain model in one process on one device, "


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def refused(path, model, optimizer, words):
    """Refused by name, and nothing is written."""
    with pytest.raises(RecordingError, match=words):
        dualform.record(model, optimizer, path)
    assert not path.exists()


# In one process with gloo


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A group of one process."""
    if not distributed.is_available():
        pytest.skip("this PyTorch is built without torch.distributed")
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def by_fsdp1(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


def by_fsdp2(mesh):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    model = network()
    fully_shard(model, mesh=mesh)
    return model


def by_fsdp2_within(mesh):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    model = network()
    fully_shard(model[1], mesh=mesh)
    return model


def by_tensor_parallelism(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(network(), mesh, {"1": ColwiseParallel()})


def by_pipeline(mesh):
    from torch.distributed.pipelining import SplitPoint, pipeline

    return pipeline(network(), mb_args=(torch.ones(3, 4),), split_spec={"1": SplitPoint.BEGINNING})


def by_pipeline_stage(mesh):
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(network(), 0, 1, torch.device("cpu"))


def by_distributed_data_parallel_within(mesh):
    return nn.Sequential(nn.parallel.DistributedDataParallel(network()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "name", "where"),
    [
        (by_fsdp1, "FSDP splits", "the model is of class FullyShardedDataParallel"),
        (by_fsdp2, "FSDP splits", "the model is of class FSDPSequential"),
        (by_fsdp2_within, "FSDP splits", "'1' is of class FSDPLinear"),
        (by_tensor_parallelism, "tensor parallelism splits", "'1.weight' is of class DTensor"),
        (by_pipeline, "pipeline parallelism runs", "the model is of class Pipe"),
        (by_pipeline_stage, "pipeline parallelism runs", "the model is of class PipelineStage"),
        (
            by_distributed_data_parallel_within,
            "DistributedDataParallel within a model runs",
            "'0' is of class DistributedDataParallel",
        ),
    ],
)
def test_what_pytorch_has(path, mesh, make, name, where):
    model = make(mesh)
    parameters = model.parameters() if isinstance(model, nn.Module) else network().parameters()
    refused(path, model, torch.optim.SGD(parameters, lr=0.1), f"^{name}.*{NOT_RECORDED.format(where)}")


# Libraries that are not installed here: classes of their names


def of(module, name, *parents):
    """A class that another library would have."""
    return type(name, parents, {"__module__": module})


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine", r"^DeepSpeed splits.*without deepspeed\.initialize\(\)"),
        ("deepspeed.runtime.pipe.engine", "PipelineEngine", "^DeepSpeed splits"),
        ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear", r"^Megatron splits.*with layers of torch\.nn"),
        ("fairscale.nn.data_parallel", "FullyShardedDataParallel", "^FSDP splits.*without fairscale"),
        ("torch_xla.distributed.fsdp", "XlaFullyShardedDataParallel", "^FSDP splits"),
        ("colossalai.zero.gemini", "GeminiDDP", "^Colossal-AI splits"),
    ],
)
def test_modules_of_other_libraries(path, module, name, words):
    class Wrapper(of(module, name, nn.Module)):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    inner = network()
    refused(path, Wrapper(inner), sgd(inner), rf"{words}")
    refused(path, nn.Sequential(Wrapper(inner)), sgd(inner), words.split(".*")[0] + ".*'0' is of class Wrapper")


def test_parameters_that_zero_3_has_split(path):
    model = network()
    model[1].weight.ds_id = 7
    refused(path, model, sgd(model), r"^DeepSpeed splits.*'1\.weight' was split by ZeRO-3")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "^DeepSpeed splits"),
        ("horovod.torch.optimizer", "_DistributedOptimizer", "^Horovod runs copies"),
    ],
)
def test_optimizers_of_other_libraries(path, module, name, words):
    """Both wrap the optimizer that a user has made, and may be wrapped themselves."""
    model = network()
    wrapper = of(module, name)()
    wrapper.optimizer = sgd(model)
    outer = of("accelerate.utils", "Wrapper")()
    outer.optimizer = wrapper
    for given in (wrapper, outer, [sgd(model), outer]):
        refused(path, model, given, rf"{words}.*the optimizer is of class {name}")


def test_other_classes_of_these_libraries_are_recorded(path):
    """DeepSpeed's optimizers for one process are optimizers like others."""
    model = network()
    kind = of("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", torch.optim.Adam)
    dualform.record(model, kind(model.parameters()), path).close()
    assert path.exists()
