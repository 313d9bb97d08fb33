"""What a run of the kit is about: one device of one platform, and some or all of its kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fitment.conditions import Reason
from fitment.conformance._round_trip import RoundTrip, round_trips
from fitment.conformance.checks import Bench
from fitment.errors import FitmentError
from fitment.facts import Kind
from fitment.hardware import Device
from fitment.kernels import Kernel
from fitment.ops._cases import cases
from fitment.ops._cases._case import Case
from fitment.plugins import Platform, Registry, load


@dataclass(frozen=True)
class Session:
    """A platform, its kernels that are looked at, and a bench on the device, or why there is no device."""

    platform: Platform
    kernels: tuple[Kernel, ...]
    device: Device | None
    bench: Bench | None
    absence: str = ""

    def cases(self, kernel: Kernel) -> tuple[Case, ...]:
        """The cases of the kernel's op."""
        return cases(kernel.op, self.platform.kv_layout)

    def admitted(self) -> Iterator[tuple[Kernel, Case]]:
        """Every case with every kernel that serves it here; a case's kernels one after the other, for what they have in common."""
        assert self.bench is not None
        for op in sorted({kernel.op for kernel in self.kernels}):
            kernels = [kernel for kernel in self.kernels if kernel.op == op]
            for case in cases(op, self.platform.kv_layout):
                yield from ((kernel, case) for kernel in kernels if not self.bench.reasons(kernel, case.facts))

    def unserved(self, kernel: Kernel) -> str:
        """Why no case is run with a kernel; "" when some are."""
        if self.bench is None:
            return self.absence
        rejections = [self.bench.reasons(kernel, case.facts) for case in self.cases(kernel)]
        if not all(rejections):
            return ""
        nearest = min(rejections, key=len)
        return f"{self.bench.device.id} runs no case of it: {_sentences(nearest)}"

    def round_trips(self) -> Iterator[tuple[Kernel, Kernel, RoundTrip]]:
        """Every kernel that writes a cache with every one that reads it, for all that both serve."""
        assert self.bench is not None
        for trip in round_trips(self.platform.kv_layout):
            serving = [kernel for kernel in self.platform.kernels if not any(self.bench.reasons(kernel, facts) for facts in trip.facts())]
            for write in serving:
                for attention in serving:
                    is_asked = write in self.kernels or attention in self.kernels
                    if is_asked and (write.op, attention.op) == ("write_kv", "paged_attention"):
                        yield write, attention, trip


def open_session(platform: str | None, device: str | None, kernels: Sequence[str]) -> Session:
    """The session that the command line asks for.

    Raises:
        FitmentError: something that it names is not there; the message lists what is.
    """
    registry = load()
    found = _platform(registry, platform)
    asked = _kernels(found, kernels)
    listing = found.listing
    if device is not None and device not in [known.id for known in listing.devices]:
        raise FitmentError(f"--device {device}: no such device; {found.name} lists "
                           f"{', '.join(known.id for known in listing.devices) or _absence(found)}")
    if not listing.devices:
        return Session(found, asked, None, None, _absence(found))
    here = next((known for known in listing.devices if known.id == device), listing.devices[0])
    return Session(found, asked, here, Bench(found, registry, here))


def _platform(registry: Registry, name: str | None) -> Platform:
    if name in registry.platforms:
        return registry.platforms[name]
    installed = ", ".join(registry.platforms) or "none; name one that is being written with FITMENT_PLUGINS=name=module"
    if name is None:
        raise FitmentError(f"--platform NAME says whose kernels to check; installed: {installed}")
    for broken in registry.broken:
        if broken.name == name:
            raise FitmentError(f"--platform {name}: its plugin is broken, at {broken.stage}: {broken.problem}")
    raise FitmentError(f"--platform {name}: no such platform; installed: {installed}")


def _kernels(platform: Platform, names: Sequence[str]) -> tuple[Kernel, ...]:
    known = {kernel.name: kernel for kernel in platform.kernels}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise FitmentError(f"--kernel {unknown[0]}: no such kernel; {platform.name} registers {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names)) or platform.kernels


def _absence(platform: Platform) -> str:
    words = _sentences(platform.listing.reasons)
    return f"no device of {platform.name} is here{': ' + words if words else ''}"


def _sentences(reasons: Sequence[Reason]) -> str:
    """Reasons in words, those that are not about the request alone where there are any."""
    lasting = [reason for reason in reasons if reason.kind is not Kind.REQUEST] or reasons
    return "; ".join(reason.sentence() for reason in lasting)
