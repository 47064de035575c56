"""Which operations autocast casts to 16 bits, which it keeps in float32, which it runs in the widest of their dtypes.

The names are ATen's, as PyTorch 2.13 and 2.14 register them for each device type (aten/src/ATen/autocast_mode.h and
.cpp; for the CPU a test asks PyTorch's dispatcher and compares). The two devices differ: on a GPU sums, exponentials
and norms are kept in float32; on a CPU they are not listed, and run in the dtype they are given.
"""

from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class CastLists:
    """The lists of one device type; an operation on none of them runs in the dtypes that it is given.

    Attributes:
        lower: all inputs are cast to the 16-bit dtype.
        full: all inputs are cast to float32.
        full_output: inputs stay, the sum is kept and returned in float32 (`dtype=float32` where none is given).
        widest: all inputs are cast to the widest floating-point dtype among them.
        lower_inside, full_inside, widest_inside: made of listed operations in C++, where a torch-function mode
            can't see them; the whole is treated as its parts would be.

    Others that are made so stay in the dtypes they are given, where PyTorch's autocast reaches into them: bilinear on a
    CPU, cov, corrcoef, matrix_power, pinv, products of sparse matrices, the cells of recurrent networks, and all of
    TorchScript.
    """

    lower: frozenset[str]
    full: frozenset[str]
    full_output: frozenset[str]
    widest: frozenset[str]
    lower_inside: frozenset[str]
    full_inside: frozenset[str]
    widest_inside: frozenset[str]


_CONVOLUTIONS = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution"
_PRODUCTS = "mm matmul bmm addmm addbmm baddbmm linear linalg_vecdot scaled_dot_product_attention"
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss
"""

CPU = CastLists(
    lower=_names(f"{_CONVOLUTIONS} {_PRODUCTS} _addmm_activation _native_multi_head_attention mkldnn_rnn_layer prelu"),
    full=_names(
        f"""{_LOSSES} binary_cross_entropy cross_entropy_loss ctc_loss multilabel_margin_loss_forward
        adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d
        max_unpool2d max_unpool3d _grid_sampler_2d_cpu_fallback grid_sampler grid_sampler_2d grid_sampler_3d
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
        fft_rfft fft_rfft2 fft_rfftn stft polar view_as_complex
        _lu_with_info cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse svd triangular_solve
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
        cdist fake_quantize_per_tensor_affine nanquantile prod quantile trace"""
    ),
    full_output=frozenset(),
    widest=_names("cat index_copy stack"),
    lower_inside=_names("einsum tensordot inner chain_matmul linalg_multi_dot lstm"),
    full_inside=_names("nll_loss_nd pad"),
    widest_inside=_names("hstack vstack dstack row_stack column_stack concat concatenate"),
)

CUDA = CastLists(
    lower=_names(
        f"""{_CONVOLUTIONS} {_PRODUCTS} convolution cudnn_convolution cudnn_convolution_transpose prelu addmv addr
        einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention"""
    ),
    full=_names(
        f"""{_LOSSES} acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
        layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity dist pdist cdist
        renorm logsumexp linalg_matrix_sqrth upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""
    ),
    full_output=_names("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm"),
    widest=_names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    lower_inside=_names("inner"),
    full_inside=_names("nll_loss_nd"),
    widest_inside=frozenset(),
)

LISTS = {"cpu": CPU, "cuda": CUDA}
