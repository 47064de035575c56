"""A call of every operation on autocast's lists for the CPU, for tests that compare ours with PyTorch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.precision.cast_lists import CPU

Call = Callable[[Any], Any]


def numbers(*shape: int) -> Tensor:
    """The same float32 numbers each time, between -2 and 2."""
    return torch.linspace(-2, 2, max(1, torch.Size(shape).numel())).sin().reshape(shape)


def definite(size: int = 3) -> Tensor:
    """A symmetric matrix with positive eigenvalues."""
    return torch.eye(size) * 3 + 0.5


A, B = numbers(4, 3), numbers(3, 5)
LOGITS, LABELS, TWOS = numbers(4, 3), torch.tensor([0, 2, 1, 0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
IMAGES, VOLUMES = numbers(2, 3, 6, 6), numbers(1, 2, 4, 4, 4)

_aten = torch.ops.aten

#: by ATen's name: a call of that operation, given the function that casts its tensors to the dtype under test
SAMPLES: dict[str, Call] = {
    # products
    "mm": lambda c: torch.mm(c(A), c(B)),
    "matmul": lambda c: c(A) @ c(B),
    "bmm": lambda c: torch.bmm(c(numbers(2, 3, 4)), c(numbers(2, 4, 3))),
    "addmm": lambda c: c(numbers(4, 5)).addmm(c(A), c(B)),
    "addbmm": lambda c: torch.addbmm(c(numbers(3, 3)), c(numbers(2, 3, 4)), c(numbers(2, 4, 3))),
    "baddbmm": lambda c: torch.baddbmm(c(numbers(2, 3, 3)), c(numbers(2, 3, 4)), c(numbers(2, 4, 3))),
    "linear": lambda c: torch.nn.functional.linear(c(A), c(numbers(5, 3)), c(numbers(5))),
    "linalg_vecdot": lambda c: torch.linalg.vecdot(c(A), c(A)),
    "scaled_dot_product_attention": lambda c: torch.nn.functional.scaled_dot_product_attention(
        *[c(numbers(1, 2, 4, 8)) for _ in range(3)]
    ),
    "_addmm_activation": lambda c: _aten._addmm_activation(c(numbers(5)), c(A), c(B)),
    "prelu": lambda c: torch.prelu(c(A), c(numbers(1))),
    "conv1d": lambda c: torch.conv1d(c(numbers(1, 3, 6)), c(numbers(2, 3, 3)), padding="same"),
    "conv2d": lambda c: torch.conv2d(c(IMAGES), c(numbers(4, 3, 3, 3)), c(numbers(4))),
    "conv3d": lambda c: torch.conv3d(c(VOLUMES), c(numbers(2, 2, 3, 3, 3))),
    "conv_tbc": lambda c: torch.conv_tbc(c(numbers(6, 1, 3)), c(numbers(3, 3, 2)), c(numbers(2))),
    "conv_transpose1d": lambda c: torch.conv_transpose1d(c(numbers(1, 3, 6)), c(numbers(3, 2, 3))),
    "conv_transpose2d": lambda c: torch.conv_transpose2d(c(IMAGES), c(numbers(3, 2, 3, 3))),
    "conv_transpose3d": lambda c: torch.conv_transpose3d(c(VOLUMES), c(numbers(2, 2, 3, 3, 3))),
    # losses
    "binary_cross_entropy": lambda c: torch.nn.functional.binary_cross_entropy(c(A).sigmoid(), c(A).sigmoid()),
    "binary_cross_entropy_with_logits": lambda c: torch.nn.functional.binary_cross_entropy_with_logits(c(A), c(A)),
    "cosine_embedding_loss": lambda c: torch.cosine_embedding_loss(c(A), c(A) + 1, c(TWOS)),
    "cross_entropy_loss": lambda c: torch.nn.functional.cross_entropy(c(LOGITS), LABELS),
    "ctc_loss": lambda c: torch.ctc_loss(
        c(numbers(5, 1, 4)).log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "hinge_embedding_loss": lambda c: torch.hinge_embedding_loss(c(A[:, 0]), c(TWOS)),
    "huber_loss": lambda c: torch.nn.functional.huber_loss(c(A), c(A) + 1),
    "kl_div": lambda c: torch.nn.functional.kl_div(c(A).log_softmax(1), c(A).softmax(1), reduction="sum"),
    "l1_loss": lambda c: torch.nn.functional.l1_loss(c(A), c(A) + 1),
    "margin_ranking_loss": lambda c: torch.margin_ranking_loss(c(A[:, 0]), c(A[:, 1]), c(TWOS)),
    "mse_loss": lambda c: torch.nn.functional.mse_loss(c(A), c(A) + 1),
    "multi_margin_loss": lambda c: torch.nn.functional.multi_margin_loss(c(LOGITS), LABELS),
    "multilabel_margin_loss": lambda c: torch.nn.functional.multilabel_margin_loss(c(A), torch.zeros(4, 3).long()),
    "nll_loss": lambda c: torch.nn.functional.nll_loss(c(LOGITS), LABELS),
    "poisson_nll_loss": lambda c: torch.nn.functional.poisson_nll_loss(c(A), c(A)),
    "smooth_l1_loss": lambda c: torch.nn.functional.smooth_l1_loss(c(A), c(A) + 1),
    "soft_margin_loss": lambda c: torch.nn.functional.soft_margin_loss(c(A), c(A).sign()),
    "triplet_margin_loss": lambda c: torch.nn.functional.triplet_margin_loss(c(A), c(A) + 1, c(A) * 2),
    # pooling, padding, sampling
    "adaptive_avg_pool3d": lambda c: torch.nn.functional.adaptive_avg_pool3d(c(VOLUMES), 2),
    "adaptive_max_pool3d": lambda c: torch.nn.functional.adaptive_max_pool3d(c(VOLUMES), 2),
    "avg_pool3d": lambda c: torch.nn.functional.avg_pool3d(c(VOLUMES), 2),
    "max_pool3d": lambda c: torch.nn.functional.max_pool3d(c(VOLUMES), 2),
    "fractional_max_pool2d": lambda c: torch.nn.functional.fractional_max_pool2d(
        c(IMAGES), 2, output_size=3, _random_samples=c(torch.full((2, 3, 2), 0.5))
    ),
    "fractional_max_pool3d": lambda c: torch.nn.functional.fractional_max_pool3d(
        c(VOLUMES), 2, output_size=2, _random_samples=c(torch.full((1, 2, 3), 0.5))
    ),
    "max_unpool2d": lambda c: torch._C._nn.max_unpool2d(
        c(numbers(1, 1, 2, 2)), torch.arange(4).view(1, 1, 2, 2), [4, 4]
    ),
    "max_unpool3d": lambda c: torch._C._nn.max_unpool3d(
        c(numbers(1, 1, 1, 2, 2)), torch.arange(4).view(1, 1, 1, 2, 2), [2, 4, 4], [2, 2, 2], [0, 0, 0]
    ),
    "grid_sampler": lambda c: torch.nn.functional.grid_sample(c(IMAGES), c(numbers(2, 4, 4, 2)), align_corners=False),
    "grid_sampler_2d": lambda c: torch.grid_sampler_2d(c(IMAGES), c(numbers(2, 4, 4, 2)), 0, 0, False),
    "grid_sampler_3d": lambda c: torch.grid_sampler_3d(c(VOLUMES), c(numbers(1, 2, 2, 2, 3)), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": lambda c: torch._grid_sampler_2d_cpu_fallback(
        c(IMAGES), c(numbers(2, 4, 4, 2)), 0, 0, False
    ),
    "reflection_pad1d": lambda c: torch.nn.functional.pad(c(A), (1, 1), "reflect"),
    "reflection_pad2d": lambda c: torch.nn.functional.pad(c(IMAGES), (1, 1, 1, 1), "reflect"),
    "replication_pad1d": lambda c: torch._C._nn.replication_pad1d(c(A), [1, 1]),
    "replication_pad2d": lambda c: torch.nn.functional.pad(c(IMAGES), (1, 1, 1, 1), "replicate"),
    "replication_pad3d": lambda c: torch.nn.functional.pad(c(VOLUMES), (1,) * 6, "replicate"),
    # transforms
    **{f"fft_{name}": lambda c, name=name: getattr(torch.fft, name)(c(numbers(4, 4))) for name in (
        "fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2",
        "rfftn",
    )},
    "stft": lambda c: torch.stft(c(numbers(64)), 16, window=torch.ones(16), return_complex=True),
    "polar": lambda c: torch.polar(c(A), c(A)),
    "view_as_complex": lambda c: torch.view_as_complex(c(numbers(3, 2))),
    # linear algebra
    **{f"linalg_{name}": lambda c, name=name: getattr(torch.linalg, name)(c(definite())) for name in (
        "cholesky", "cholesky_ex", "cond", "eigh", "eigvals", "eigvalsh", "inv", "inv_ex", "matrix_rank", "svdvals"
    )},
    "linalg_eig": lambda c: torch.linalg.eig(c(definite())),
    "linalg_qr": lambda c: torch.linalg.qr(c(definite())),
    "linalg_svd": lambda c: torch.linalg.svd(c(definite())),
    "linalg_solve": lambda c: torch.linalg.solve(c(definite()), c(numbers(3, 2))),
    "linalg_lstsq": lambda c: torch.linalg.lstsq(c(A), c(numbers(4, 2)))[0],
    "linalg_tensorinv": lambda c: torch.linalg.tensorinv(c(definite()).reshape(3, 3), ind=1),
    "linalg_tensorsolve": lambda c: torch.linalg.tensorsolve(c(definite()), c(numbers(3))),
    "linalg_householder_product": lambda c: torch.linalg.householder_product(c(A), c(numbers(3))),
    "linalg_matrix_sqrth": lambda c: _aten.linalg_matrix_sqrth(c(definite())),
    "_lu_with_info": lambda c: torch.lu(c(definite())),
    "cholesky_inverse": lambda c: torch.cholesky_inverse(c(definite())),
    "cholesky_solve": lambda c: torch.cholesky_solve(c(numbers(3, 2)), c(definite())),
    "geqrf": lambda c: torch.geqrf(c(A)),
    "inverse": lambda c: torch.inverse(c(definite())),
    "lu_solve": lambda c: torch.lu_solve(c(numbers(3, 1)), *torch.linalg.lu_factor(definite())),
    "orgqr": lambda c: torch.orgqr(c(A), c(numbers(3))),
    "ormqr": lambda c: torch.ormqr(c(A), c(numbers(3)), c(numbers(4, 2))),
    "pinverse": lambda c: torch.pinverse(c(definite())),
    "svd": lambda c: torch.svd(c(definite())),
    "triangular_solve": lambda c: torch.triangular_solve(c(numbers(3, 2)), c(definite())),
    # reductions and others
    "cdist": lambda c: torch.cdist(c(A), c(A) + 1),
    "fake_quantize_per_tensor_affine": lambda c: torch.fake_quantize_per_tensor_affine(c(A), 0.1, 0, -8, 7),
    "nanquantile": lambda c: torch.nanquantile(c(A), 0.5),
    "quantile": lambda c: torch.quantile(c(A), 0.5, dim=1),
    "prod": lambda c: c(A).prod(1),
    "trace": lambda c: torch.trace(c(definite())),
    # joins, of a tensor in the dtype under test and one in bfloat16
    "cat": lambda c: torch.cat([c(A), A.bfloat16()]),
    "stack": lambda c: torch.stack([c(A), A.bfloat16()]),
    "index_copy": lambda c: torch.index_copy(c(A), 0, torch.tensor([1]), A[:1].bfloat16()),
}  # fmt: skip

#: on the lists, but a part of another operation, or called by no one
UNCALLED = {
    "_convolution",
    "_native_multi_head_attention",
    "mkldnn_rnn_layer",
    "multilabel_margin_loss_forward",
    "nll_loss2d",
}

#: made of listed operations in C++
MADE_OF_LISTED: dict[str, Call] = {
    "einsum": lambda c: torch.einsum("ij,jk->ik", c(A), c(B)),
    "einsum of a list": lambda c: torch.einsum("ij,jk", [c(A), c(B)]),
    "einsum without a sum": lambda c: torch.einsum("i,j->ij", c(A[:, 0]), c(A[:, 1])),
    "tensordot": lambda c: torch.tensordot(c(A), c(B), 1),
    "inner": lambda c: torch.inner(c(A), c(A)),
    "inner of vectors": lambda c: torch.inner(c(A[0]), c(A[1])),
    "chain_matmul": lambda c: torch.linalg.multi_dot([c(A), c(B), c(B).t()]),
    "hstack": lambda c: torch.hstack([c(A), A.bfloat16()]),
    "nll_loss_nd": lambda c: torch.nn.functional.nll_loss(c(LOGITS), LABELS),
    "pad with zeros": lambda c: torch.nn.functional.pad(c(A), (1, 1)),
    "attention module": lambda c: torch.nn.functional.multi_head_attention_forward(
        *[c(numbers(5, 1, 4)) for _ in range(3)], 4, 2, c(numbers(12, 4)), c(numbers(12)), None, None, False, 0.0,
        c(numbers(4, 4)), c(numbers(4)),
    )[0],
    # on no list
    "softmax": lambda c: c(A).softmax(1),
    "sum": lambda c: c(A).sum(),
    "exp": lambda c: c(A).exp(),
    "layer_norm": lambda c: torch.nn.functional.layer_norm(c(A), (3,)),
    "mv": lambda c: torch.mv(c(A), c(numbers(3))),
}  # fmt: skip

LISTED = CPU.lower | CPU.full | CPU.widest
