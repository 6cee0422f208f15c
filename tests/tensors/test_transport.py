"""What ranks exchange inside a forward: the operator and what a compiler is told about it."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.internals import exchange_rows, exchange_rows_backward, name_of_ranks


class Echo:
    """Ranks of which every one sends back what it gets."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return values.clone()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("slots", [[], [4, 1]])
def test_keys_and_values_of_other_dtypes_are_as_a_compiler_expects(
    dtypes: tuple[torch.dtype, torch.dtype], slots: list[int]
) -> None:
    echo = Echo()
    k, v = (torch.randn(6, 2, 4, dtype=each).requires_grad_() for each in dtypes)
    how = torch.tensor(slots, dtype=torch.int64), [len(slots)], [len(slots)], name_of_ranks(echo)
    rows = exchange_rows(k, v, *how)
    with FakeTensorMode() as mode:
        fake = exchange_rows(*map(mode.from_tensor, (k, v, how[0])), *how[1:])
    assert (fake.dtype, fake.shape) == (rows.dtype, rows.shape)
    arguments = rows.detach(), k.detach(), v.detach(), *how
    gradients = exchange_rows_backward(*arguments)
    with FakeTensorMode() as mode:
        fakes = exchange_rows_backward(*map(mode.from_tensor, arguments[:4]), *how[1:])
    for real, fake in zip(gradients, fakes, strict=True):
        assert (fake.dtype, fake.shape) == (real.dtype, real.shape)
