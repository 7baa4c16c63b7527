//! The product of a panel: 32 outputs times some tokens, all inputs.
//!
//! A register holds 16 outputs side by side, so no sum is ever taken across lanes. A line of codes is read once for a
//! tile of tokens. Each of its planes has four inputs of every output. One instruction multiplies these by four inputs
//! of a token's limb, the same for all lanes, and adds up. These sums are integers and exact. At the end of a block
//! they become floating-point numbers in a fixed order of correctly rounded operations. So all instruction sets, tile
//! sizes and thread counts give the same bits.
#![allow(unsafe_code)] // pointers into slices whose lengths `Panel::check` has compared with the layout

use super::activations::Rows;
use super::layout::{unit_inputs, unit_lines, Block, Layout, ScaleFormat, LANES, LINE, PANEL};
use super::windows::Windows;

/// Sixteen outputs of an instruction set.
///
/// # Safety
/// Every method may be called only where the instruction set exists, with pointers to as many bytes as its type says.
pub(super) trait Lanes {
    /// 64 bytes: four codes of each output.
    type Codes: Copy;
    /// 16 sums.
    type Ints: Copy;
    /// 16 results.
    type Floats: Copy;
    /// Whether one sum for each output and limb of a single token would wait for itself.
    const WAITS: bool;
    /// Amount added to the levels of [`Lanes::look_up`].
    const RAISED: u8;

    /// Reads a line.
    unsafe fn line(at: *const u8) -> Self::Codes;
    /// `(c >> by) & mask` for every byte; bits that come from the next byte are masked off.
    unsafe fn bits(c: Self::Codes, by: u32, mask: u8) -> Self::Codes;
    /// `a | b`.
    unsafe fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// Four signed bytes, repeated for all lanes, times four codes of each lane, added to its sum. `WIDE` codes may
    /// have all eight bits.
    unsafe fn dot<const WIDE: bool>(sum: Self::Ints, c: Self::Codes, x: *const i8) -> Self::Ints;
    /// The level of each code, from a table of sixteen, raised by `RAISED`.
    unsafe fn look_up(c: Self::Codes, levels: &[i8; 16]) -> Self::Codes;
    /// [`Lanes::dot`] with raised levels.
    unsafe fn dot_levels(sum: Self::Ints, c: Self::Codes, x: *const i8) -> Self::Ints;
    /// The same number in all lanes.
    unsafe fn splat(value: i32) -> Self::Ints;
    /// Sixteen bytes as numbers, each times `value`.
    unsafe fn times(bytes: *const u8, value: i32) -> Self::Ints;
    /// `a + b`.
    unsafe fn add(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Rounded to floating point.
    unsafe fn float(sums: Self::Ints) -> Self::Floats;
    /// The same number in all lanes.
    unsafe fn splat_float(value: f32) -> Self::Floats;
    /// Sixteen scales.
    unsafe fn scales(at: *const u8, format: ScaleFormat) -> Self::Floats;
    /// `a * b`.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `c - by` for every byte, wrapping.
    unsafe fn minus(c: Self::Codes, by: u8) -> Self::Codes;
    /// Writes 64 bytes.
    unsafe fn store_codes(to: *mut u8, c: Self::Codes);
    /// Reads 16 sums.
    unsafe fn load_ints(at: *const i32) -> Self::Ints;
    /// Reads 16 numbers.
    unsafe fn load(at: *const f32) -> Self::Floats;
    /// Writes 16 numbers.
    unsafe fn store(to: *mut f32, values: Self::Floats);
    /// Values of 32 rows in two records, as the sums of the four bytes of mixed states: each lane has those of a row as two
    /// numbers of 16 bits. The rows are those at `at` and `next`, in an order of the instruction set.
    unsafe fn pair<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> [Self::Codes; 2];
    /// Two numbers, the same for all lanes, times each lane's two of [`Lanes::pair`], added to its sum.
    unsafe fn dot_pair(sum: Self::Ints, pair: Self::Codes, x: *const i16) -> Self::Ints;
    /// Sums of 32 rows in their own order, given in that of [`Lanes::pair`].
    #[inline(always)]
    unsafe fn in_order<const BITS: u32>(sums: [Self::Ints; 2]) -> [Self::Ints; 2] {
        sums
    }
    /// Adds the products of a pair of values with two numbers of each word.
    #[inline(always)]
    unsafe fn add_pair<const BITS: u32, const W: usize>(
        sums: &mut [[Self::Ints; 2]; W],
        at: *const u8,
        next: *const u8,
        windows: &Windows,
        x: [*const i16; W],
    ) {
        // SAFETY: the caller's.
        unsafe {
            let pair = Self::pair::<BITS>(at, next, windows);
            for word in 0..W {
                for half in 0..2 {
                    sums[word][half] = Self::dot_pair(sums[word][half], pair[half], x[word]);
                }
            }
        }
    }
    /// Asks for the cache line of an address that may lie outside of any slice.
    unsafe fn prefetch(at: *const u8);
    /// Adds the products of a block: [`multiply`], or the same sums in another way.
    #[inline(always)]
    unsafe fn products_of<
        const BITS: u32,
        const TABLE: bool,
        const L: usize,
        const T: usize,
        const S: usize,
    >(
        p: &Panel<'_>,
        panel: usize,
        block: &Block,
        x: *const i8,
        sums: &mut Sums<Self::Ints, L, T, S>,
    ) where
        Self: Sized,
    {
        // SAFETY: the caller's.
        unsafe { multiply::<Self, BITS, TABLE, L, T, S>(p, panel, block, x, sums) }
    }
}

/// Panels and the tokens that they multiply.
pub(super) struct Panel<'a> {
    pub(super) layout: &'a Layout,
    /// Codes and scales of some panels.
    pub(super) bytes: &'a [u8],
    pub(super) rows: &'a Rows,
    /// First of the tokens, a multiple of 16.
    pub(super) token: usize,
    /// Results, (panels, tokens, 32).
    pub(super) out: &'a mut [f32],
}

impl Panel<'_> {
    pub(super) fn check(&self) {
        let (layout, rows) = (self.layout, self.rows);
        assert!(self.bytes.len().is_multiple_of(layout.panel) && self.panels() > 0);
        assert!(rows.stride == layout.row && rows.holds(self.token + self.tokens()));
        assert!(self.out.len() == self.panels() * self.tokens() * PANEL);
    }

    /// How many panels there are.
    pub(super) fn panels(&self) -> usize {
        self.bytes.len() / self.layout.panel
    }

    /// How many tokens there are.
    pub(super) fn tokens(&self) -> usize {
        self.out.len() / PANEL / self.panels()
    }

    /// Scales of half of a panel's outputs.
    ///
    /// # Safety
    /// As [`panel`], after `check`.
    #[inline(always)]
    pub(super) unsafe fn scales_of<V: Lanes>(&self, panel: usize, block: &Block, half: usize) -> V::Floats {
        let format = self.layout.scales;
        let bytes = if format == ScaleFormat::F32 { 4 } else { 2 };
        let at = panel * self.layout.panel + block.scales + half * LANES * bytes;
        // SAFETY: the layout's offset.
        unsafe { V::scales(self.bytes.as_ptr().add(at), format) }
    }

    /// Zero points of half of a panel's outputs, in an asymmetric layout.
    ///
    /// # Safety
    /// As [`panel`], after `check`.
    #[inline(always)]
    pub(super) unsafe fn zeros_of(&self, panel: usize, block: &Block, half: usize) -> *const u8 {
        let zeros = block.scales + self.layout.zeros_after_scales() + half * LANES;
        // SAFETY: the layout's offset.
        unsafe { self.bytes.as_ptr().add(panel * self.layout.panel + zeros) }
    }
}

/// Distance of the prefetch in bytes: the memory's latency times its full reading speed.
pub(super) const AHEAD: usize = 8192;

/// All tokens of each panel, `T` at a time and then one at a time.
///
/// # Safety
/// The instruction set of `V` must exist.
#[inline(always)]
pub(super) unsafe fn panel<V: Lanes, const BITS: u32, const TABLE: bool, const L: usize, const T: usize>(
    p: Panel<'_>,
) {
    p.check();
    assert!(p.rows.limbs == L && p.layout.grid.bits == BITS && p.layout.grid.table().is_some() == TABLE);
    let tokens = p.tokens();
    for number in 0..p.panels() {
        let mut token = 0;
        while token < tokens {
            // SAFETY: `check` has compared the lengths of all slices with the layout. `tile` writes exactly its number
            // of tokens, and at least as many are left.
            unsafe {
                let out = p.out.as_mut_ptr().add((number * tokens + token) * PANEL);
                if T > 1 && tokens - token >= T {
                    tile::<V, BITS, TABLE, L, T, 1>(&p, number, token, out);
                    token += T;
                    continue;
                }
                if V::WAITS {
                    // Two sums for each output, in turns.
                    tile::<V, BITS, TABLE, L, 1, 2>(&p, number, token, out);
                } else {
                    tile::<V, BITS, TABLE, L, 1, 1>(&p, number, token, out);
                }
                token += 1;
            }
        }
    }
}

/// `T` tokens, with `S` integer sums for each output, token and limb.
///
/// # Safety
/// As [`panel`]; the slices of `p` must have been checked, with `T` tokens from `token` on and as many at `out`.
#[inline(always)]
unsafe fn tile<
    V: Lanes,
    const BITS: u32,
    const TABLE: bool,
    const L: usize,
    const T: usize,
    const S: usize,
>(
    p: &Panel<'_>,
    panel: usize,
    token: usize,
    out: *mut f32,
) {
    // SAFETY: offsets are those of the layout, which the slices were compared with.
    unsafe {
        let x = p.rows.bytes().as_ptr().add((p.token + token) * L * p.rows.stride);
        let mut results = [[V::splat_float(0.0); 2]; T];
        for (b, block) in p.layout.blocks.iter().enumerate() {
            let mut sums = start::<V, TABLE, L, T, S>(p, panel, token, b);
            V::products_of::<BITS, TABLE, L, T, S>(p, panel, block, x.add(block.at), &mut sums);
            for half in 0..2 {
                let weight_scales = p.scales_of::<V>(panel, block, half);
                for t in 0..T {
                    let scales = V::mul(
                        weight_scales,
                        V::splat_float(p.rows.scale(p.token + token + t, b) * p.layout.unit),
                    );
                    let mut digits = [V::splat(0); L];
                    for (limb, digit) in digits.iter_mut().enumerate() {
                        *digit = sums[0][t][limb][half];
                        for more in &sums[1..] {
                            *digit = V::add(*digit, more[t][limb][half]);
                        }
                    }
                    results[t][half] = V::fma(value_of::<V, L>(digits), scales, results[t][half]);
                }
            }
        }
        for (t, halves) in results.iter().enumerate() {
            V::store(out.add(t * PANEL), halves[0]);
            V::store(out.add(t * PANEL + LANES), halves[1]);
        }
    }
}

/// Combines the sums of a block's limbs, lowest first.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
pub(super) unsafe fn value_of<V: Lanes, const L: usize>(digits: [V::Ints; L]) -> V::Floats {
    // SAFETY: the caller's.
    unsafe {
        let mut value = V::float(digits[L - 1]);
        for digit in digits[..L - 1].iter().rev() {
            value = V::fma(value, V::splat_float(256.0), V::float(*digit));
        }
        value
    }
}

/// Integer sums of a tile: `[set][token][limb][half of the panel]`.
pub(super) type Sums<I, const L: usize, const T: usize, const S: usize> = [[[[I; 2]; L]; T]; S];

/// The amount to subtract for the zero point or for raised levels: either times the sum of the activations.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn start<V: Lanes, const TABLE: bool, const L: usize, const T: usize, const S: usize>(
    p: &Panel<'_>,
    panel: usize,
    token: usize,
    b: usize,
) -> Sums<V::Ints, L, T, S> {
    // SAFETY: an asymmetric layout has a line of zero points after the scales.
    unsafe {
        let mut sums = [[[[V::splat(0); 2]; L]; T]; S];
        for t in 0..T {
            for limb in 0..L {
                let minus_sum = p.rows.minus_sum(p.token + token + t, b, limb);
                for half in 0..2 {
                    sums[0][t][limb][half] = if TABLE {
                        V::splat(minus_sum * i32::from(V::RAISED))
                    } else if p.layout.grid.symmetric {
                        V::splat(minus_sum << (p.layout.grid.bits - 1))
                    } else {
                        V::times(p.zeros_of(panel, &p.layout.blocks[b], half), minus_sum)
                    };
                }
            }
        }
        sums
    }
}

/// Adds the products of a block.
///
/// # Safety
/// As [`tile`]; `x` is where the block begins in the first row.
#[inline(always)]
pub(super) unsafe fn multiply<
    V: Lanes,
    const BITS: u32,
    const TABLE: bool,
    const L: usize,
    const T: usize,
    const S: usize,
>(
    p: &Panel<'_>,
    panel: usize,
    block: &Block,
    x: *const i8,
    sums: &mut Sums<V::Ints, L, T, S>,
) {
    let (lines, inputs) = (unit_lines(BITS), unit_inputs(BITS));
    // SAFETY: as in `tile`; prefetching may look past the end.
    unsafe {
        let mut at = p.bytes.as_ptr().add(panel * p.layout.panel + block.codes);
        for unit in 0..block.units {
            let x = x.add(unit * inputs);
            let strips = [lines_of::<V, BITS>(at), lines_of::<V, BITS>(at.add(lines * LINE))];
            for line in 0..2 * lines {
                V::prefetch(at.wrapping_add(AHEAD + line * LINE));
            }
            for plane in 0..inputs / 4 {
                let codes = [
                    values_of::<V, BITS, TABLE>(p, strips[0], plane),
                    values_of::<V, BITS, TABLE>(p, strips[1], plane),
                ];
                for t in 0..T {
                    for limb in 0..L {
                        let x = x.add((t * L + limb) * p.rows.stride + plane * 4);
                        let pair = &mut sums[plane % S][t][limb];
                        if TABLE {
                            *pair =
                                [V::dot_levels(pair[0], codes[0], x), V::dot_levels(pair[1], codes[1], x)];
                        } else if BITS == 8 {
                            *pair =
                                [V::dot::<true>(pair[0], codes[0], x), V::dot::<true>(pair[1], codes[1], x)];
                        } else {
                            *pair = [
                                V::dot::<false>(pair[0], codes[0], x),
                                V::dot::<false>(pair[1], codes[1], x),
                            ];
                        }
                    }
                }
            }
            at = at.add(2 * lines * LINE);
        }
    }
}

/// A unit's lines, of sixteen outputs.
///
/// # Safety
/// As [`panel`], with a unit's half at `at`.
#[inline(always)]
pub(super) unsafe fn lines_of<V: Lanes, const BITS: u32>(at: *const u8) -> [V::Codes; 3] {
    // SAFETY: the caller's.
    unsafe { [0, 1, 2].map(|line| V::line(at.add(line % unit_lines(BITS) * LINE))) }
}

/// A plane of a unit's codes, or of their raised levels, a byte each.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
pub(super) unsafe fn values_of<V: Lanes, const BITS: u32, const TABLE: bool>(
    p: &Panel<'_>,
    lines: [V::Codes; 3],
    plane: usize,
) -> V::Codes {
    // SAFETY: the caller's.
    unsafe {
        let codes = codes_of::<V, BITS>(lines, plane);
        if TABLE {
            V::look_up(codes, &p.layout.levels)
        } else {
            codes
        }
    }
}

/// A plane of a unit's codes, a byte each.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
pub(super) unsafe fn codes_of<V: Lanes, const BITS: u32>(lines: [V::Codes; 3], plane: usize) -> V::Codes {
    let plane = plane as u32;
    // SAFETY: the caller's.
    unsafe {
        match BITS {
            8 => lines[0],
            3 => {
                let pair = if plane < 6 {
                    lines[plane as usize / 2]
                } else {
                    let [low, middle, high] =
                        [3, 2, 1].map(|by| V::bits(lines[3 - by as usize], by, 0x88 >> by));
                    V::or(V::or(low, middle), high)
                };
                V::bits(pair, plane % 2 * 4, 7)
            }
            _ => V::bits(lines[0], plane * BITS, u8::MAX >> (8 - BITS)),
        }
    }
}
