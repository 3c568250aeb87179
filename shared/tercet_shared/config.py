"""Settings of every service: one typed field and one description each, for ``--help``, the environment and the docs.

A setting is given as a flag (``--max-num-seqs 64``) or in the environment (``TERCET_MAX_NUM_SEQS=64``); the flag wins.
Nothing else in Tercet reads the environment for settings. Each service parses its own class; ``tercet serve`` parses
`ServeSettings` and hands the right ones to each child.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, NoDecode, SettingsConfigDict, SettingsError

from tercet_shared.errors import ConfigurationError
from tercet_shared.output import while_it_is_read

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MiB = 1024 * 1024

Dtype = Literal["auto", "bfloat16", "float32"]
Quantization = Literal["auto", "none", "int8", "fp8"]
Device = Literal["auto", "cpu", "cuda"]


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""Several values: a flag that is given several times, or one environment variable with commas or as a JSON list."""


def _split_sources(value: object) -> object:
    """As `_split`, but a comma between double quotes is part of a path."""
    if not isinstance(value, str) or value.startswith("["):
        return _split(value)
    return [part.strip() for part in next(csv.reader([value], skipinitialspace=True), []) if part.strip()]


def _split_weights(value: object) -> object:
    """As `_split`, but what has no name belongs to what is before it: ``NAME=MODEL:WEIGHT,MODEL:WEIGHT``."""
    if not isinstance(value, str) or value.startswith("["):
        return _split(value)
    splits: list[str] = []
    for part in (part.strip() for part in value.split(",")):
        if splits and "=" not in part:
            splits[-1] += f",{part}"
        elif part:
            splits.append(part)
    return splits


Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Common(BaseModel):
    """What every process understands."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is logged."
    )
    report_fd: int | None = Field(
        None, ge=0, description="Descriptor on which progress and fatal errors are reported to the supervisor."
    )
    heartbeat_interval: Seconds = Field(1.0, description="Seconds between signs of life on a link or stream.")
    heartbeat_timeout: Seconds = Field(3.0, description="Seconds of silence after which a peer counts as dead.")
    max_message_bytes: ByteSize = Field(
        ByteSize(32 * MiB), ge=1 * MiB, description="Largest gRPC message between front end and core."
    )
    grace: Seconds = Field(3.0, description="Seconds that accepted requests may take to finish after SIGTERM.")
    log_format: Literal["text", "json"] = Field(
        "text", description="How lines of the log are written; json has the ids of traces."
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="Port of /metrics for Prometheus, and of /livez and /readyz; 0 takes a free one, none is the "
        "default. `tercet serve` gives it to the front end, the next to the core, then to the worker, then to further "
        "front ends.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics.")
    otlp_endpoint: str | None = Field(
        None,
        description="Collector of traces and metrics (OTLP over gRPC), as http://host:4317; by default that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, if that is set.",
    )
    trace_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of requests that are traced where there is a collector; the decision of a request's own "
        "traceparent comes first.",
    )
    mtls_cert: Path | None = Field(
        None,
        description="Certificate chain (PEM) with which front ends and cores identify themselves to each other; not on "
        "Unix sockets.",
    )
    mtls_key: Path | None = Field(None, description="Its private key (PEM, not encrypted).")
    mtls_ca: Path | None = Field(None, description="Issuers (PEM) of the certificates that the other side must show.")
    mtls_name: str | None = Field(
        None, description="Name in the certificates of cores, where it is not the address that they are reached at."
    )


class ModelChoice(BaseModel):
    """Which checkpoint."""

    model: CliPositionalArg[str] = Field(
        description="Directory of a Hugging Face checkpoint, a GGUF file, or a model id of the Hugging Face hub."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")


class FrontendOptions(BaseModel):
    """What a user of the front end may set."""

    host: str = Field("127.0.0.1", description="Address that the HTTP server listens on.")
    port: int = Field(8000, ge=0, le=65_535, description="Port that the HTTP server listens on; 0 takes a free one.")
    served_model_name: Names = Field(
        default_factory=list,
        description="Names under which the model is served; by default the stem of the directory or file.",
    )
    api_key: Names = Field(
        default_factory=list, description="Keys of which a client must send one; without any, all clients are served."
    )
    api_keys_file: Path | None = Field(
        None,
        description="File of API keys with tenants and limits, JSON or TOML (docs/access.md); read again when it "
        "changes.",
    )
    max_body_bytes: ByteSize = Field(ByteSize(10 * MiB), description="Largest request body that is read.")
    max_requests: int = Field(
        4096, ge=0, description="Requests in progress at once in one front end; 0 sets no limit. Others get 429."
    )
    max_waiting: int = Field(
        2048, ge=0, description="Those of them that may wait for their first token; 0 sets no limit. Others get 429."
    )
    max_connections: int = Field(
        8192, ge=0, description="Connections at once to one front end; 0 sets no limit. Others get 503."
    )
    receive_timeout: Seconds = Field(
        60.0, description="Seconds in which a client must send the head of a request, and then its body."
    )
    client_timeout: Seconds = Field(
        60.0, description="Seconds after which a client is cut that takes nothing of its answer."
    )
    sse_heartbeat: float = Field(
        15.0,
        ge=0,
        le=86_400,
        description="Seconds of silence in a stream after which a comment is sent; 0 sends none.",
    )
    max_event_rate: int = Field(
        8000,
        ge=0,
        description="Events per second that one front end writes before tokens of a stream go together; 0 sends each "
        "token by itself.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM) for HTTPS; read again when it changes.")
    tls_key: Path | None = Field(None, description="Its private key (PEM, not encrypted).")
    tls_client_ca: Path | None = Field(
        None, description="Issuers (PEM) of the certificates that clients must show; none asks for no certificate."
    )
    cors_origin: Names = Field(
        default_factory=list, description="Origins whose pages may call from a browser, as https://host; * for all."
    )
    trusted_proxy: Names = Field(
        default_factory=list,
        description="Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.",
    )
    access_log: str = Field(
        "off", description="Where each request is logged as a line of JSON: off, stderr, or a file."
    )
    audit_log: Path | None = Field(
        None, description="File for who did what: requests that need a key, refusals, changes of keys and certificates."
    )
    tool_call_parser: str = Field(
        "auto", description="Format of tool calls in answers; auto takes the one of the chat template, none reads none."
    )
    reasoning_parser: str = Field(
        "auto", description="Format of reasoning in answers; auto takes the one of the chat template, none reads none."
    )
    trust_request_chat_template: bool = Field(
        False, description="Let requests bring a chat template of their own, which runs in the server."
    )
    chat_page: bool = Field(True, description="Serve a page to chat with the model at /.")
    dashboard: bool = Field(True, description="Serve a page that shows what happens now at /dashboard.")


class SchedulerOptions(BaseModel):
    """What a user of the core may set."""

    policy: Literal["priority", "fcfs", "fair"] = Field(
        "priority", description="Order in which waiting requests are admitted."
    )
    pipeline_depth: int = Field(
        2, ge=1, le=16, description="Steps that are planned before the oldest result is awaited."
    )
    long_prefill_limit: int = Field(
        0, ge=0, description="Most prompt tokens of one request in one step; 0 leaves only the step's budget."
    )
    max_partial_prefills: int = Field(
        0, ge=0, description="Requests whose prompt is computed in part at a time; 0 sets no limit."
    )
    prefix_caching: bool = Field(True, description="Reuse the KV blocks of prompts that begin alike.")
    worker_failures: int = Field(
        3, ge=1, le=1000, description="Losses of the worker in a row, without a step in between, that end the core."
    )
    step_timeout: Seconds = Field(
        30.0, description="Seconds for the result of a step, after which its worker is given up although it shows life."
    )
    watchdog: Seconds = Field(60.0, description="Seconds without a step, while there is work, that end the core.")
    dump_dir: Path | None = Field(
        None, description="Directory for the plans of steps that failed (they hold prompts); by default none is kept."
    )


class LimitOptions(BaseModel):
    """Limits that the worker offers and the core keeps to."""

    max_num_seqs: int = Field(256, ge=1, le=65_536, description="Requests that run at once (slots).")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=1_048_576, description="Tokens that one step may compute; the default depends on the device."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompt and output that one request may have; by default the model's own limit.",
    )


class WorkerOptions(BaseModel):
    """What a user of the worker may set."""

    device: Device = Field(
        "auto", description="What computes; auto takes an NVIDIA GPU where torch and its extra packages find one."
    )
    enforce_eager: bool = Field(
        False, description="On a GPU: compile nothing and capture no graphs. Starts faster, and decodes slower."
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Part of a GPU's memory that the worker may take; what weights and steps leave of it is KV cache.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="On a GPU: fp8 keeps keys and values in eight bits; auto in the type of the model."
    )
    dtype: Dtype = Field("auto", description="Type of weights, activations and KV cache; auto takes what is fast here.")
    quantization: Quantization = Field(
        "auto",
        description="auto keeps a checkpoint's quantized weights as they are (a CPU all but FP8, a GPU FP8 alone), "
        "none makes them dense, int8 (on a CPU) and fp8 (on a GPU) also make eight bits of dense ones. With bfloat16; "
        "otherwise weights are dense.",
    )
    compact_weights: bool = Field(
        True,
        description="On a CPU with AVX2 or AVX-512 keep dense bfloat16 weights in twelve bits each, without loss: a "
        "model takes a quarter less memory, and decoding that much less time.",
    )
    batch_invariant: bool = Field(
        False,
        description="Insist that a request's tokens depend on nothing that is computed beside it. The CPU kernels "
        "always see to that; without them the worker does not start. A GPU computes more slowly with it.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per block of the KV cache.")
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="Memory for the KV cache; by default a quarter of what is free, or all that the slots can use.",
    )
    num_kv_blocks: int | None = Field(None, ge=2, description="Blocks of the KV cache, instead of a memory size.")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads that compute; by default as many as processors that this process may use, one less where "
        "they are more than two.",
    )


class ParallelOptions(BaseModel):
    """How many processes compute the model together."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Ranks (processes, one device each) that divide every layer among them (docs/parallel.md).",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Stages that the layers are divided into, each of as many ranks as --tensor-parallel-size says.",
    )
    rendezvous_timeout: Seconds = Field(120.0, description="Seconds in which all ranks must have found each other.")


MAX_FRONTENDS = 64

_POSITIONAL = "model"
"""In the core it is a flag like others, which has None for a default."""


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="TERCET_",
        env_ignore_empty=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_enforce_required=False,
        use_attribute_docstrings=False,
        nested_model_default_partial_update=False,
    )
    EXAMPLES: ClassVar[str] = ""
    """What ``--help`` shows below the flags."""

    def arguments(self) -> list[str]:
        """Returns the command line that parses to these settings (only what differs from the defaults)."""
        positional: list[str] = []
        flags: list[str] = []
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if is_positional(name, info):
                positional.extend([_quoted(item) for item in value] if isinstance(value, list) else [str(value)])
            elif value == info.get_default(call_default_factory=True) or value is None:
                continue
            elif isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{_kebab(name)}")
            elif isinstance(value, list):
                flags.extend(f"--{_kebab(name)}={item}" for item in value)
            else:
                flags.append(f"--{_kebab(name)}={_plain(value)}")
        return [*flags, *positional]

    def narrow(self, kind: type[S], **values: Any) -> S:
        """Returns settings of another service with the fields that both have taken from here, and ``values``."""
        shared = {name: getattr(self, name) for name in kind.model_fields if name in type(self).model_fields}
        return kind.model_construct(**{**_defaults(kind), **shared, **values})


S = TypeVar("S", bound=_Settings)


def is_positional(name: str, info: FieldInfo) -> bool:
    """Returns whether a setting is given on the command line without a flag."""
    return name == _POSITIONAL and info.default is not None


def _quoted(source: str) -> str:
    return f'"{source}"' if "," in source else source


def _plain(value: object) -> str:
    return str(int(value)) if isinstance(value, ByteSize) else str(value)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _defaults(kind: type[_Settings]) -> dict[str, Any]:
    return {
        name: info.get_default(call_default_factory=True)
        for name, info in kind.model_fields.items()
        if not info.is_required()
    }


class FrontendSettings(_Settings, Common, FrontendOptions):
    """The front end: OpenAI-style HTTP in, token streams out."""

    model_config = SettingsConfigDict(cli_prog_name="tercet frontend")
    EXAMPLES = """\
  tercet frontend --core 127.0.0.1:8100 ./checkpoint
  tercet frontend --core 10.0.0.1:8100 --core 10.0.0.2:8100 --host 0.0.0.0 HuggingFaceTB/SmolLM2-135M-Instruct
  TERCET_REDIS_URL=redis://10.0.0.9 tercet frontend --model-alias chat=smollm2 --model-split new=smollm2:0.9,smollm3:0.1
"""

    model: CliPositionalArg[Annotated[list[str], NoDecode, BeforeValidator(_split_sources)]] = Field(
        default_factory=list,
        description="Models to serve, as SOURCE or NAME=SOURCE: a directory of a Hugging Face checkpoint, a GGUF file, "
        "or a model id of the hub. With Redis, models that cores announce come by themselves.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model; for one MODEL alone.")
    model_alias: Names = Field(default_factory=list, description="Another name for a model, as NAME=MODEL.")
    model_split: Annotated[list[str], NoDecode, BeforeValidator(_split_weights)] = Field(
        default_factory=list,
        description="A name whose requests are divided among models, as NAME=MODEL:WEIGHT,MODEL:WEIGHT.",
    )
    max_discovered_models: int = Field(
        16, ge=0, le=1_000, description="Models that cores announce whose tokenizers are kept at once."
    )
    core: Names = Field(
        default_factory=list,
        description="Addresses of the cores, as host:port or unix:/path; without Redis these are all.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis in which cores are found, that keeps responses for what follows them, and counts quotas for "
        "all front ends, as redis://host:port/0; best given in the environment, as it may hold a password. Without it "
        "cores are those of --core, and the rest is kept in the process.",
    )
    redis_prefix: str = Field("tercet", min_length=1, max_length=64, description="What the registry's keys begin with.")
    discover_cores: bool = Field(
        True, description="With Redis: use the cores that register there, besides those of --core."
    )
    routing_policy: Literal["prefix", "least_loaded", "round_robin", "session"] = Field(
        "prefix", description="How the core of a request is chosen (docs/fleet.md)."
    )
    max_attempts: int = Field(
        3, ge=1, le=100, description="Cores that may be lost while they run a request before it is given up."
    )
    migration_timeout: Seconds = Field(
        30.0, description="Seconds in which a request whose core is gone must find another one."
    )
    drain_delay: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Seconds after SIGTERM in which new requests are still served while /readyz says 503 already.",
    )
    api_keys_redis: bool = Field(
        False, description="Look for API keys in Redis too. (Quotas are counted there wherever there is a Redis.)"
    )
    response_ttl: Seconds = Field(86_400.0, description="Seconds that a stored response is kept.")
    listen_fd: int | None = Field(
        None, ge=0, description="Descriptor of a socket that listens already and is shared, instead of host and port."
    )
    process_socket: Path | None = Field(
        None, description="Unix socket on which this process answers too, where several share a port."
    )
    accept_when_ready: bool = Field(
        False, description="Take no connection before requests can be served; until then others take them."
    )


class CoreSettings(_Settings, Common, SchedulerOptions, LimitOptions):
    """The core: schedules requests onto its worker."""

    model_config = SettingsConfigDict(cli_prog_name="tercet core")
    EXAMPLES = """\
  tercet core --listen 127.0.0.1:8100 --link run/worker.sock
  tercet core --policy fair --metrics-port 9100 --model ./checkpoint
"""

    listen: str = Field("127.0.0.1:8100", description="Address for front ends, as host:port or unix:/path.")
    link: Path = Field(Path("run/worker.sock"), description="Unix socket to which the worker connects.")
    remote_workers: bool = Field(
        False,
        description="Let workers on other hosts connect at --listen, as tercet worker --core-address does. Whoever "
        "reaches that port can then be the worker, unless --mtls-cert keeps strangers out.",
    )
    model: str | None = Field(
        None,
        description="The worker's model, whose tokenizer grammars need; without it they are refused. With Redis, front "
        "ends read the tokenizer there too.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    core_id: str | None = Field(None, description="Name of this core; by default one is made up at each start.")
    served_model_name: Names = Field(
        default_factory=list,
        description="Names under which front ends serve this core's model; by default its own, as the worker found it.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis in which this core registers for front ends to find it, as redis://host:port/0; best given "
        "in the environment, as it may hold a password.",
    )
    redis_prefix: str = Field("tercet", min_length=1, max_length=64, description="What the registry's keys begin with.")
    advertise: str | None = Field(
        None,
        description="Address that is registered, as host:port or unix:/path; by default that of --listen, unless it "
        "stands for several.",
    )
    worker_timeout: Seconds = Field(600.0, description="Seconds to wait for the worker to connect after the start.")


class WorkerSettings(_Settings, Common, ModelChoice, LimitOptions, WorkerOptions, ParallelOptions):
    """The worker: holds the model and computes the steps that its core plans."""

    model_config = SettingsConfigDict(cli_prog_name="tercet worker")
    EXAMPLES = """\
  tercet worker --link run/worker.sock ./checkpoint
  tercet worker --dtype float32 --threads 8 --kv-cache-memory 4GiB ./model.gguf
  tercet worker --tensor-parallel-size 2 ./checkpoint
  tercet worker --tensor-parallel-size 8 --pipeline-parallel-size 2 --nodes 2 --node-rank 1 \\
    --rendezvous 10.0.0.1:8200 --core-address 10.0.0.1:8100 ./checkpoint
"""

    link: Path = Field(Path("run/worker.sock"), description="Unix socket of the core.")
    core_address: str | None = Field(
        None, description="Address of a core on another host (its --listen), as host:port, instead of --link."
    )
    nodes: int = Field(
        1, ge=1, le=1024, description="Hosts that the ranks are divided among evenly, in their order; one command each."
    )
    node_rank: int = Field(0, ge=0, le=1023, description="Number of this host among --nodes, from 0.")
    rendezvous: str | None = Field(
        None, description="Where the ranks of several hosts find each other, as host:port of host 0."
    )
    local_rank: int | None = Field(
        None, ge=0, description="Number of this process among the ranks of its host; set by what starts them."
    )
    rendezvous_fd: int | None = Field(
        None, ge=0, description="Descriptor of the socket that listens at --rendezvous; set by what starts the ranks."
    )


class ServeSettings(
    _Settings, Common, ModelChoice, FrontendOptions, SchedulerOptions, LimitOptions, WorkerOptions, ParallelOptions
):
    """All three services on this machine: no Redis, one core, one worker, each a process of its own."""

    model_config = SettingsConfigDict(cli_prog_name="tercet serve")
    EXAMPLES = """\
  tercet serve ./SmolLM2-135M-Instruct.Q4_1.gguf
  tercet serve HuggingFaceTB/SmolLM2-135M-Instruct --port 9000 --dtype float32
  TERCET_API_KEY=secret tercet serve ./checkpoint --host 0.0.0.0 --max-num-seqs 64
"""

    frontends: int = Field(1, ge=1, le=MAX_FRONTENDS, description="Processes that serve HTTP, on one port.")
    run_dir: Path | None = Field(None, description="Directory for sockets; by default a private temporary one.")


def parse(kind: type[S], argv: list[str]) -> S:
    """Returns settings from a command line and the environment.

    Raises:
        ConfigurationError: a value is wrong; the sentence names the setting.
        SystemExit: ``--help`` was asked for (0), or a flag does not exist (2).
    """
    try:
        return CliApp.run(kind, cli_args=argv, cli_exit_on_error=True)
    except SystemExit as end:
        if not end.code and kind.EXAMPLES:
            with while_it_is_read():
                print(f"\nexamples:\n{kind.EXAMPLES}", end="")  # noqa: T201  # to where the help went
        raise
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""  # of a list: not which of its values
        positional = name in kind.model_fields and is_positional(name, kind.model_fields[name])
        flag = name.upper() if positional else f"--{_kebab(name)} (TERCET_{name.upper()})"
        raise ConfigurationError(f"{flag}: {first['msg']}.", param=name) from error


__all__ = [
    "Common", "CoreSettings", "Dtype", "FrontendSettings", "MiB", "ServeSettings", "WorkerSettings",
    "is_positional", "parse",
]  # fmt: skip
