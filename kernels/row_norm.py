"""Triton kernels of all norms over a row: one forward and one backward kernel, with flags.

    RMSNorm, LayerNorm           y = v w + b,  v = (h - mean) inv
    CoupledNorm's shared place   the same, with inv given: no sum over the row, in neither direction
    TaperNorm                    y = g (v w) + (1 - g) c h w_tilde
    with a residual add          h = x + a
    with an output norm          h = x + N_out(a), an RMSNorm

What is not asked for is None, and costs nothing: Triton compiles a kernel for each case.

A row of at most WHOLE channels is held in registers: each loop of the forward kernel is then one
round, and the compiler keeps what it has loaded. A longer row is read again, from cache, in each
loop. The backward kernel needs <u, v> and sum(u) of the whole row; of a longer row a kernel before
it computes them. Each channel group has programs of its own, so that norms without groups cost
nothing more.

Names: X input, A summand, H = X + A, W gain, B bias, WT w_tilde, GATE_C (g, c), Y output, INV the
statistic (1 / rms or 1 / std). W_OUT and INV_OUT belong to N_out. DX is the gradient of X, and so
on.
"""

import torch
import triton
import triton.language as tl

from . import rows
from .operands import Gradients, Inputs, Outputs, Saved, Settings, Upstream
from .rows import inverse_root, load, load_gain, offsets, store, store_partial


@triton.jit
def add_pairs(a, b, c, d):
    """(a, b) + (c, d)."""
    return a + c, b + d


@triton.jit
def load_stream(
    X,
    A,
    W_OUT,
    H,
    inv_out,
    row,
    valid,
    first,
    col,
    x_stride,
    a_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a tile of x; of h = x + a or x + a inv_out w_out, rounded to the type of H. float32."""
    mask = valid[:, None] & (col < C)[None, :]
    h = load(X, row, first + col, x_stride, mask)
    if A is not None:
        a = load(A, row, first + col, a_stride, mask)
        if inv_out is not None:
            a = a * inv_out[:, None]
            if W_OUT is not None:
                a = a * load_gain(W_OUT, ROWS, col, C)
        h = (h + a).to(H.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def forward_kernel(
    X,
    A,
    GIVEN,
    W,
    B,
    W_OUT,
    WT,
    GATE_C,
    Y,
    H,
    MEAN,
    INV,
    INV_OUT,
    n_rows,
    x_stride,
    a_stride,
    eps,
    eps_out,
    C: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise a tile of rows of one group.

    C is the number of channels of each group. GIVEN is the statistic of a shared position. INV is
    None with it, MEAN for all but LayerNorm, INV_OUT without an output norm, Y and INV without a
    norm of h. All stores come after all loads but those of the last loop.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    valid = row < n_rows
    in_float32: tl.constexpr = X.dtype.element_ty == tl.float32
    if GATE_C is not None and in_float32 and COLUMNS == 2048:
        # TaperNorm has no groups. Known at compile time, it saves a register: two would spill (by
        # triton 3.8 on sm_80).
        group = 0
    first = group * C  # the first channel of this group
    inv_out = None
    if INV_OUT is not None:
        # A sum for each column of the tile; one reduction over columns at the end.
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            a = load(A, row, col, a_stride, valid[:, None] & (col < C)[None, :])
            square += a * a
        inv_out = inverse_root(square, eps_out, C)
    if MEAN is not None:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            total += load_stream(
                X, A, W_OUT, H, inv_out, row, valid, first, col, x_stride, a_stride, C, ROWS
            )
        mean = tl.sum(total, 1) / C
    if INV is not None:
        # A pass of its own after the mean: E[x^2] - E[x]^2 would cancel where the mean is large.
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            v = load_stream(
                X, A, W_OUT, H, inv_out, row, valid, first, col, x_stride, a_stride, C, ROWS
            )
            if MEAN is not None:  # 0 beyond the row, where h - mean is not
                v = tl.where((col < C)[None, :], v - mean[:, None], 0.0)
            if COUNTED < C:  # partial RMSNorm
                v = tl.where((col < COUNTED)[None, :], v, 0.0)
            square += v * v
        inv = inverse_root(square, eps, COUNTED)
    if GIVEN is not None:
        inv = tl.load(GIVEN + row, mask=valid, other=0.0)
    # Loaded here, the gate takes the fewest registers. But of 16-bit rows in tiles of 4,096 columns
    # two spill then (by triton 3.8 on sm_90), and none do where it is loaded in the loop.
    gate_is_late: tl.constexpr = COLUMNS == 4096 and not in_float32
    if GATE_C is not None and not gate_is_late:
        gate = tl.load(GATE_C)
        rest = (1.0 - gate) * tl.load(GATE_C + 1)
    # The sum is stored as soon as it is there, but at a shared position after y: before it some
    # registers spill (1,600 channels, sm_100).
    h_is_first: tl.constexpr = GIVEN is None
    for start in range(0, C, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (col < C)[None, :]
        h = load_stream(
            X, A, W_OUT, H, inv_out, row, valid, first, col, x_stride, a_stride, C, ROWS
        )
        if H is not None and h_is_first:
            store(H, row, first + col, C * GROUPS, h, mask)
        if Y is not None:
            v = h
            if MEAN is not None:
                v = h - mean[:, None]
            y = v * inv[:, None]
            if W is not None:
                y = y * load_gain(W + first, ROWS, col, C)
            if B is not None:
                y = y + load_gain(B + first, ROWS, col, C)
            if GATE_C is not None:
                if gate_is_late:
                    gate = tl.load(GATE_C)
                    rest = (1.0 - gate) * tl.load(GATE_C + 1)
                if WT is not None:
                    h = h * load_gain(WT, ROWS, col, C)
                y = gate * y + rest * h
            store(Y, row, first + col, C * GROUPS, y, mask)
        if H is not None and not h_is_first:
            store(H, row, first + col, C * GROUPS, h, mask)
    if MEAN is not None:
        tl.store(MEAN + row, mean, mask=valid)
    if INV is not None:  # (rows, GROUPS); 64 bits as in rows.offsets
        tl.store(INV + row.to(tl.int64) * GROUPS + group, inv, mask=valid)
    if INV_OUT is not None:
        tl.store(INV_OUT + row, inv_out, mask=valid)


@triton.jit
def dots_kernel(
    DY,
    X,
    W,
    MEAN,
    INV,
    DOT,
    SUM,
    n_rows,
    dy_stride,
    x_stride,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute DOT = <u, v> and, for LayerNorm, SUM = sum(u), with u = dy w.

    For rows that are too long for one tile.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < n_rows
    first = group * C
    inv = tl.load(INV + row.to(tl.int64) * GROUPS + group, mask=valid, other=0.0)
    dot = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, C, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (col < C)[None, :]
        u = load(DY, row, first + col, dy_stride, mask)
        v = load(X, row, first + col, x_stride, mask)
        if W is not None:
            u = u * load_gain(W + first, ROWS, col, C)
        if MEAN is not None:
            v = v - tl.load(MEAN + row, mask=valid, other=0.0)[:, None]
            total += u
        dot += u * (v * inv[:, None])  # v is only x, or x - mean, until here
    tl.store(DOT + row.to(tl.int64) * GROUPS + group, tl.sum(dot, 1), mask=valid)
    if MEAN is not None:
        tl.store(SUM + row, tl.sum(total, 1), mask=valid)


@triton.jit
def backward_kernel(
    DY,
    DH,
    DS,
    X,
    A,
    W,
    W_OUT,
    WT,
    GATE_C,
    MEAN,
    INV,
    INV_OUT,
    DOT,
    SUM,
    DX,
    DA,
    DW,
    DB,
    DW_OUT,
    DWT,
    n_rows,
    chunk,
    dy_stride,
    dh_stride,
    x_stride,
    a_stride,
    C: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients for one chunk of rows, one group and one tile of columns.

    With s = inv, v = x s (or (x - mean) s), u = dy w and n = COUNTED:

        dx = s (u - v (<u, v> + s ds) / n - mean(u)) + dh,    dw = sum of dy v,    db = sum of dy

    mean(u) is LayerNorm's alone. The part with v reaches only the counted channels. At a SHARED
    position inv is a constant, and dx = s u + dh. TaperNorm weights this by g, and adds
    (1 - g) c dy w_tilde. An output norm h = x + a p w_out, with p = inv_out and r = dx w_out, has

        da = p (r - (a p) <r, a p> / n),    dw_out = sum of dx a p

    X is the norm's input, rounded: h where the forward kernel added. DH (gradient of the residual
    stream), DS (gradient of INV) and what a norm does not have are None. DOT and SUM are given
    where a row has several tiles, else None. With AHEAD two rounds of rows are on their way.
    """
    group = tl.program_id(1)
    first = group * C  # the first channel of this group
    col = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # A gain stays in registers, but where another map of the row, or its length, leaves too few.
    stays: tl.constexpr = DA is None and GATE_C is None and COLUMNS <= 4096
    if W is not None and stays:
        w = load_gain(W + first, ROWS, col, C)
    if GATE_C is not None:
        gate = tl.load(GATE_C)
        rest = (1.0 - gate) * tl.load(GATE_C + 1)
    # Sums over rows. They stay in registers while the program goes through its rows.
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    dw_out = tl.zeros((ROWS, COLUMNS), tl.float32)
    dwt = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    needs_v: tl.constexpr = not SHARED or DW is not None
    if AHEAD:
        # The rows of the first round. Each round begins to load those of the next one, in their own
        # type, before it computes.
        row = begin + tl.arange(0, ROWS)
        valid = row < end
        mask = valid[:, None] & (col < C)[None, :]
        if needs_v:
            next_v = tl.load(X + offsets(row, first + col, x_stride), mask=mask, other=0.0)
        next_u = tl.load(DY + offsets(row, first + col, dy_stride), mask=mask, other=0.0)
        next_inv = tl.load(INV + row.to(tl.int64) * GROUPS + group, mask=valid, other=0.0)
        if MEAN is not None:
            next_mean = tl.load(MEAN + row, mask=valid, other=0.0)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < end
        mask = valid[:, None] & (col < C)[None, :]
        statistic = row.to(tl.int64) * GROUPS + group
        if AHEAD:
            u = next_u.to(tl.float32)
            inv = next_inv
            after = row + ROWS
            is_there = after < end
            more = is_there[:, None] & (col < C)[None, :]
            if needs_v:
                v = next_v.to(tl.float32)
                next_v = tl.load(X + offsets(after, first + col, x_stride), mask=more, other=0.0)
            next_u = tl.load(DY + offsets(after, first + col, dy_stride), mask=more, other=0.0)
            next_inv = tl.load(INV + after.to(tl.int64) * GROUPS + group, mask=is_there, other=0.0)
            if MEAN is not None:
                mean = next_mean
                next_mean = tl.load(MEAN + after, mask=is_there, other=0.0)
        else:
            inv = tl.load(INV + statistic, mask=valid, other=0.0)
            if needs_v:
                v = load(X, row, first + col, x_stride, mask)
            u = load(DY, row, first + col, dy_stride, mask)
            if MEAN is not None:
                mean = tl.load(MEAN + row, mask=valid, other=0.0)
        if DB is not None:
            db += u
        if GATE_C is not None:
            fixed = u
            if DWT is not None:
                dwt += u * v
            if WT is not None:
                fixed = fixed * load_gain(WT, ROWS, col, C)
        if MEAN is not None:
            v = v - mean[:, None]
        if needs_v:
            v = v * inv[:, None]  # the normalised input, computed again
        if DW is not None:
            dw += u * v
        if W is not None and stays:
            u = u * w
        if W is not None and not stays:
            u = u * load_gain(W + first, ROWS, col, C)
        if not SHARED:
            # <u, v> of the whole row, (ROWS,)
            if DOT is not None:
                dot = tl.load(DOT + statistic, mask=valid, other=0.0)
            elif MEAN is not None:
                # Both sums in one reduction: half as many waits of the warps for each other.
                dot, total = tl.reduce((u * v, u), 1, add_pairs)
            else:
                dot = tl.sum(u * v, 1)
            if DS is not None:
                # d inv / dx = -inv^2 v / n, so <u, v> and inv ds go the same way.
                dot += inv * tl.load(DS + statistic, mask=valid, other=0.0)
            through = v * (dot / COUNTED)[:, None]  # what the statistics take away from u
            if COUNTED < C:  # channels that are not counted do not change inv
                through = tl.where((col < COUNTED)[None, :], through, 0.0)
            if MEAN is not None:
                if SUM is not None:
                    total = tl.load(SUM + row, mask=valid, other=0.0)
                through += (total / C)[:, None]
            u = u - through
        dx = u * inv[:, None]
        if GATE_C is not None:
            dx = gate * dx + rest * fixed
        if DH is not None:  # h goes on as the residual stream as well
            dx += load(DH, row, first + col, dh_stride, mask)
        dx = dx.to(DX.dtype.element_ty).to(tl.float32)
        store(DX, row, first + col, C * GROUPS, dx, mask)
        if DA is not None:
            # a is read only here: before the store of dx it would take registers that at 8192
            # columns are not there.
            inv_out = tl.load(INV_OUT + row, mask=valid, other=0.0)
            d = load(A, row, col, a_stride, mask) * inv_out[:, None]
            if DW_OUT is not None:
                dw_out += dx * d
            if W_OUT is not None:
                dx = dx * load_gain(W_OUT, ROWS, col, C)
            da = dx - d * (tl.sum(dx * d, 1) / C)[:, None]
            store(DA, row, col, C, da * inv_out[:, None], mask)
    if GATE_C is not None:
        dw = gate * dw
        dwt = rest * dwt
    # One row of partial sums for each program
    store_partial(DW if DW is None else DW + first, tl.program_id(0), col, C, C * GROUPS, dw)
    store_partial(DB if DB is None else DB + first, tl.program_id(0), col, C, C * GROUPS, db)
    store_partial(DW_OUT, tl.program_id(0), col, C, C, dw_out)
    store_partial(DWT, tl.program_id(0), col, C, C, dwt)


# ---------------------------------------------------------------------------------------- launchers


def forward(inputs: Inputs, settings: Settings) -> Outputs:
    """Launch the forward kernel of a norm; the statistics are float32."""
    x, a = inputs.x, inputs.a
    kind, groups = settings.kind, settings.groups
    has_output_norm = settings.eps_out is not None
    dtype = x.dtype
    if a is not None and not has_output_norm:
        dtype = torch.promote_types(x.dtype, a.dtype)
    row = (*x.shape[:-1], 1)
    in_groups = (*x.shape[:-1], groups)
    has_statistic = kind and inputs.given is None
    outputs = Outputs(
        y=rows.empty(x.shape, dtype, x.device) if kind else None,
        h=None if a is None else rows.empty(x.shape, dtype, x.device),
        mean=rows.empty(row, torch.float32, x.device) if kind == "layer" else None,
        inv=rows.empty(in_groups, torch.float32, x.device) if has_statistic else None,
        inv_out=rows.empty(row, torch.float32, x.device) if has_output_norm else None,
    )
    channels = x.shape[-1] // groups
    x = rows.as_rows(x)
    a = rows.as_rows(a)
    widest = rows.WHOLE if inputs.given is None else rows.NARROW
    work = rows.split(x, channels, rows.FORWARD, widest, reduces=inputs.given is None)
    # With an add and a bias, triton 3.8 chooses 40 registers for sm_90, and spills. With up to 48,
    # as many programs are resident as by other versions. It is an option of NVIDIA's GPUs alone.
    options: dict[str, int] = {}
    adds_bias = a is not None and inputs.b is not None
    is_long = work.meta["COLUMNS"] in (rows.WHOLE // 4, rows.WHOLE // 2)
    if adds_bias and is_long and dtype.itemsize < 4 and torch.version.hip is None:
        options["maxnreg"] = 48
    rows.launch(
        forward_kernel,
        (work.row_tiles, groups),
        x,
        X=x,
        A=a,
        GIVEN=rows.adjacent(inputs.given),
        W=rows.adjacent(inputs.w),
        B=rows.adjacent(inputs.b),
        W_OUT=rows.adjacent(inputs.w_out),
        WT=rows.adjacent(inputs.w_tilde),
        GATE_C=None if inputs.gate_c is None else inputs.gate_c.float().contiguous(),
        Y=outputs.y,
        H=outputs.h,
        MEAN=outputs.mean,
        INV=outputs.inv,
        INV_OUT=outputs.inv_out,
        n_rows=x.shape[0],
        x_stride=rows.stride(x),
        a_stride=rows.stride(a),
        eps=settings.eps,
        eps_out=settings.eps_out or 0.0,
        C=channels,
        COUNTED=settings.counted or channels,
        GROUPS=groups,
        **work.meta,
        **options,
    )
    return outputs


def split_backward(
    x: torch.Tensor, channels: int, saved: Saved, is_shared: bool
) -> tuple[rows.Work, dict[str, int]]:
    """Split the work of the backward kernel, for the most rows on their way without a spill.

    Chosen by counted registers: results/cpu/kernels/counts.md.

    Args:
        x: input (rows, groups * channels).
        channels: of a group.
        saved: what forward has saved.
        is_shared: does the norm take a statistic that it is given?

    Returns:
        The work; AHEAD and, where it is needed, a limit of registers a thread.
    """
    # Of 16 warps, with 64 registers a thread, two programs are resident. TaperNorm and two norms
    # need more. At half of the widest tile, and beyond, their programs have 8 warps: at just half
    # two are resident with 128 registers, and beyond it 16 warps would spill. A shorter row that
    # takes the same tile has 16: with 8 some would spill.
    half = rows.WHOLE // 2
    has_output_norm = saved.a is not None and channels <= rows.WHOLE
    has_two_maps = has_output_norm or saved.gate_c is not None
    is_full = has_two_maps and channels == half
    widest = rows.NARROW if is_shared else rows.WHOLE
    most_warps = 8 if has_two_maps and channels >= half else 16
    work = rows.split(x, channels, rows.BACKWARD, widest, most_warps=most_warps)
    # Rows ahead take registers, in float32 twice as many. At the widest row no norm has them. At
    # half of it LayerNorm, and RMSNorm with a bias, keep to 64 without; two programs of 8 warps
    # need none.
    width = work.meta["COLUMNS"]
    ahead = is_shared or width < half
    if width == half and x.element_size() < 4 and not is_full:
        ahead = has_two_maps or (saved.mean is None and saved.b is None)
    options = {"AHEAD": ahead}
    # TaperNorm keeps to 128 registers by a limit, an option of NVIDIA's GPUs alone. Two norms keep
    # to them without, but on sm_100 and 120 by triton 3.8, where a limit spills.
    if is_full and not has_output_norm and torch.version.hip is None:
        options["maxnreg"] = 128
    return work, options


def backward(upstream: Upstream, saved: Saved, settings: Settings, gains: bool) -> Gradients:
    """Launch the backward kernel of a norm.

    Returns:
        The gradients; without `gains` x and a alone. a and w_out have none for rows of more than
        WHOLE channels: the caller then takes them from that of x.
    """
    groups = saved.inv.shape[-1]
    channels = saved.x.shape[-1] // groups
    is_shared = settings.kind == "shared"
    dx = rows.empty(saved.x.shape, saved.x.dtype, saved.x.device)
    da = None
    if saved.a is not None and channels <= rows.WHOLE:
        da = rows.empty(saved.a.shape, saved.a.dtype, saved.a.device)
    dy = rows.as_rows(upstream.dy)
    dh = rows.as_rows(upstream.dh)
    x = rows.as_rows(saved.x)
    a = None if da is None else rows.as_rows(saved.a)
    w = rows.adjacent(saved.w)
    inv = rows.adjacent(saved.inv)
    work, options = split_backward(x, channels, saved, is_shared)
    dot = None
    total = None
    if work.column_tiles > 1 and not is_shared:
        dot = rows.empty(inv.shape, torch.float32, x.device)
        total = None
        if saved.mean is not None:
            total = rows.empty(saved.mean.shape, torch.float32, x.device)
        rows.launch(
            dots_kernel,
            (work.row_tiles, groups),
            x,
            DY=dy,
            X=x,
            W=w,
            MEAN=saved.mean,
            INV=inv,
            DOT=dot,
            SUM=total,
            n_rows=x.shape[0],
            dy_stride=rows.stride(dy),
            x_stride=rows.stride(x),
            C=channels,
            GROUPS=groups,
            **work.meta,
        )
    tensors = {
        "DY": dy,
        "DH": dh,
        "DS": rows.adjacent(upstream.ds),
        "X": x,
        "A": a,
        "W": w,
        "W_OUT": rows.adjacent(saved.w_out),
        "WT": rows.adjacent(saved.w_tilde),
        "GATE_C": None if saved.gate_c is None else saved.gate_c.float().contiguous(),
        "MEAN": saved.mean,
        "INV": inv,
        "INV_OUT": saved.inv_out,
        "DOT": dot,
        "SUM": total,
        "DX": dx,
        "DA": da,
    }
    strides = {
        "dy_stride": rows.stride(dy),
        "dh_stride": rows.stride(dh),
        "x_stride": rows.stride(x),
        "a_stride": rows.stride(a),
    }
    sums = rows.launch_backward(
        backward_kernel,
        x,
        work,
        x.shape[0],
        tensors,
        strides,
        parameters={
            "DW": saved.w if gains else None,
            "DB": saved.b if gains else None,
            "DW_OUT": saved.w_out if gains and da is not None else None,
            "DWT": saved.w_tilde if gains else None,
        },
        groups=groups,
        C=channels,
        COUNTED=settings.counted or channels,
        GROUPS=groups,
        SHARED=is_shared,
        **options,
    )
    return Gradients(
        x=dx, a=da, w=sums["DW"], b=sums["DB"], w_out=sums["DW_OUT"], w_tilde=sums["DWT"]
    )
