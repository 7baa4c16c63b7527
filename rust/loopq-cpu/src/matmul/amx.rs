//! The panel with AMX: tiles of 16 tokens times 16 outputs, 64 inputs at a time.
//!
//! A plane of codes (four inputs of 16 outputs) is one row of `tdpbssd`'s second operand, and a limb's bytes of 16
//! tokens are its first operand. So the codes of a block are expanded while the previous one is multiplied, and sums
//! are added up while the next tile is multiplied. The sums are over the same integers as everywhere else, so the bits
//! are the same.
//!
//! The compiler has no stable intrinsics for these instructions; they are written in assembly. Tiles hold nothing between two
//! panels.
#![allow(unsafe_code)] // assembly, and pointers into slices whose lengths `Panel::check` has compared with the layout

use std::arch::asm;
use std::mem::MaybeUninit;

use super::activations::{Order, TILE, TILE_BYTES};
use super::layout::{unit_inputs, unit_lines, Block, LANES, LINE, PANEL};
use super::tile::{lines_of, value_of, values_of, Lanes, Panel, AHEAD};
use super::GROUP;
use loopq_core::simd::amx::Tiles;

/// Tiles of codes that the longest block fills for 16 outputs.
const STEPS: usize = 4;

/// A block's codes as bytes, of each panel and half of it.
#[repr(C, align(64))]
struct Codes([[u8; STEPS * TILE_BYTES]; 2 * GROUP]);

/// The sums of a tile of tokens, of each half of a panel and limb.
#[repr(C, align(64))]
struct Sums([[i32; TILE * LANES]; 6]);

/// Multiplies up to `GROUP` panels by all tokens; their activations lie in tiles.
///
/// Stored data are read again only after other work. A load of data that is on its way to the cache in pieces waits
/// until all of it has arrived. So the codes of a block are expanded while the previous one is multiplied, and sums are
/// added up while the next tile is multiplied.
///
/// # Safety
/// The instruction set of `V` must exist, and AMX's `permitted` must have said yes.
#[inline(always)]
pub(super) unsafe fn panel<V: Lanes, const BITS: u32, const TABLE: bool, const L: usize, const T: usize>(
    mut p: Panel<'_>,
) {
    p.check();
    let tokens = p.tokens();
    assert!(p.rows.limbs == L && p.layout.grid.bits == BITS && p.panels() <= GROUP);
    assert!(p.layout.grid.table().is_some() == TABLE);
    assert!(p.rows.order == Order::Tiles && p.token.is_multiple_of(TILE));
    p.out.fill(0.0);
    #[allow(clippy::large_stack_arrays)] // 64 KiB, of which a block of 128 inputs touches half
    let mut codes = [MaybeUninit::<Codes>::uninit(), MaybeUninit::<Codes>::uninit()];
    let mut sums = [MaybeUninit::<Sums>::uninit(), MaybeUninit::<Sums>::uninit()];
    let (blocks, symmetric) = (&p.layout.blocks, p.layout.grid.symmetric);
    // SAFETY: tiles are configured before they are used and released at the end. Pointers stay within the slices
    // compared above. Codes are expanded before they are read, and sums stored.
    unsafe {
        let _tiles = Tiles::configure();
        spread::<V, BITS, TABLE>(&p, &blocks[0], codes[0].as_mut_ptr());
        let (mut turn, mut last) = (0, None);
        for (b, block) in blocks.iter().enumerate() {
            if let Some(next) = blocks.get(b + 1) {
                spread::<V, BITS, TABLE>(&p, next, codes[(b + 1) % 2].as_mut_ptr());
            }
            for tile in 0..tokens.div_ceil(TILE) {
                let at = ((p.token / TILE + tile) * p.layout.steps + block.step) * L * TILE_BYTES;
                let x = p.rows.bytes().as_ptr().add(at);
                for panel in 0..p.panels() {
                    let halves = codes[b % 2].as_ptr().cast::<[u8; STEPS * TILE_BYTES]>().add(2 * panel);
                    let to = sums[turn].as_mut_ptr().cast::<[i32; TILE * LANES]>();
                    multiply::<L>(halves, x, to, block.steps(BITS), symmetric);
                    if let Some((b, tile, panel)) = last.replace((b, tile, panel)) {
                        let from = sums[1 - turn].as_ptr().cast::<[i32; TILE * LANES]>();
                        if symmetric {
                            add_up::<V, L, true>(&mut p, from, b, tile, panel);
                        } else {
                            add_up::<V, L, false>(&mut p, from, b, tile, panel);
                        }
                    }
                    turn = 1 - turn;
                }
            }
        }
        if let Some((b, tile, panel)) = last {
            let from = sums[1 - turn].as_ptr().cast::<[i32; TILE * LANES]>();
            if symmetric {
                add_up::<V, L, true>(&mut p, from, b, tile, panel);
            } else {
                add_up::<V, L, false>(&mut p, from, b, tile, panel);
            }
        }
    }
}

/// A block's codes as bytes, signed where the grid is symmetric, with zeros up to a whole number of tiles.
///
/// # Safety
/// As [`panel`], with room for the codes of its panels at `to`.
#[inline(always)]
unsafe fn spread<V: Lanes, const BITS: u32, const TABLE: bool>(p: &Panel<'_>, block: &Block, to: *mut Codes) {
    let (lines, inputs) = (unit_lines(BITS), unit_inputs(BITS));
    let middle = match (TABLE, p.layout.grid.symmetric) {
        (true, _) => V::RAISED,
        (false, true) => 1 << (BITS - 1),
        (false, false) => 0,
    };
    let (planes, filled) = (block.units * inputs / 4, block.steps(BITS) * TILE);
    // SAFETY: the layout's offsets stay within the panels, whose length was compared with it. A block has at most 256
    // inputs, 64 planes.
    unsafe {
        for panel in 0..p.panels() {
            let mut at = p.bytes.as_ptr().add(panel * p.layout.panel + block.codes);
            let halves = to.cast::<u8>().add(2 * panel * STEPS * TILE_BYTES);
            let halves = [halves, halves.add(STEPS * TILE_BYTES)];
            for unit in 0..block.units {
                let strips = [lines_of::<V, BITS>(at), lines_of::<V, BITS>(at.add(lines * LINE))];
                for line in 0..2 * lines {
                    V::prefetch(at.wrapping_add(AHEAD + line * LINE));
                }
                for plane in 0..inputs / 4 {
                    let offset = (unit * inputs / 4 + plane) * LINE;
                    for half in 0..2 {
                        let plane = V::minus(values_of::<V, BITS, TABLE>(p, strips[half], plane), middle);
                        V::store_codes(halves[half].add(offset), plane);
                    }
                }
                at = at.add(2 * lines * LINE);
            }
            for half in halves {
                half.add(planes * LINE).write_bytes(0, (filled - planes) * LINE);
            }
        }
    }
}

/// Loads tile 6 with activations, or tile 7 with codes.
macro_rules! load {
    ($tile:literal, $at:expr) => {
        asm!(concat!("tileloadd ", $tile, ", [{} + {}]"), in(reg) $at, in(reg) LINE,
             options(nostack, preserves_flags, readonly))
    };
}
/// An instruction on the tile of sums with that number.
macro_rules! on_sums {
    ($number:expr, $before:literal, $after:literal $(, $operand:expr)*) => {
        match $number {
            0 => asm!(concat!($before, "tmm0", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
            1 => asm!(concat!($before, "tmm1", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
            2 => asm!(concat!($before, "tmm2", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
            3 => asm!(concat!($before, "tmm3", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
            4 => asm!(concat!($before, "tmm4", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
            _ => asm!(concat!($before, "tmm5", $after) $(, in(reg) $operand)*, options(nostack, preserves_flags)),
        }
    };
}

/// Sums of products of 16 tokens: `sums[half * L + limb]` is (tokens, 16 outputs).
///
/// # Safety
/// As [`panel`]; `codes` points to two halves of `steps` tiles, `x` to `steps` times `L` tiles, `sums` to room for `2 L`.
#[inline(always)]
unsafe fn multiply<const L: usize>(
    codes: *const [u8; STEPS * TILE_BYTES],
    x: *const i8,
    sums: *mut [i32; TILE * LANES],
    steps: usize,
    signed: bool,
) {
    // SAFETY: the caller's.
    unsafe {
        for sum in 0..2 * L {
            on_sums!(sum, "tilezero ", "");
        }
        for step in 0..steps {
            for half in 0..2 {
                load!("tmm7", codes.add(half).cast::<u8>().add(step * TILE_BYTES));
                for l in 0..L {
                    load!("tmm6", x.add((step * L + l) * TILE_BYTES));
                    if signed {
                        on_sums!(half * L + l, "tdpbssd ", ", tmm6, tmm7");
                    } else {
                        on_sums!(half * L + l, "tdpbsud ", ", tmm6, tmm7");
                    }
                }
            }
        }
        for sum in 0..2 * L {
            on_sums!(sum, "tilestored [{} + {}], ", "", sums.add(sum), LINE);
        }
    }
}

/// Adds the sums of a block to the results of a tile's tokens.
///
/// # Safety
/// As [`panel`], with the sums of [`multiply`].
#[inline(always)]
unsafe fn add_up<V: Lanes, const L: usize, const SYMMETRIC: bool>(
    p: &mut Panel<'_>,
    sums: *const [i32; TILE * LANES],
    b: usize,
    tile: usize,
    panel: usize,
) {
    let (block, tokens) = (&p.layout.blocks[b], p.tokens());
    // SAFETY: offsets of the layout, and tokens within the results.
    unsafe {
        let scales = [p.scales_of::<V>(panel, block, 0), p.scales_of::<V>(panel, block, 1)];
        let first = tile * TILE;
        let rows = tokens.min(first + TILE) - first;
        // Checked once: only these two arrays are read from the activations' scales and sums.
        let step = p.layout.blocks.len();
        let (from, to) = ((p.token + first) * step + b, (p.token + first + rows - 1) * step + b);
        let token_scales = p.rows.scales[from..=to].as_ptr();
        let minus_sums = p.rows.minus_sums[from * L..(to + 1) * L].as_ptr();
        let out = p.out.as_mut_ptr().add((panel * tokens + first) * PANEL);
        for row in 0..rows {
            let scale = V::splat_float(*token_scales.add(row * step) * p.layout.unit);
            for half in 0..2 {
                let mut digits = [V::splat(0); L];
                for (limb, digit) in digits.iter_mut().enumerate() {
                    *digit = V::load_ints(sums.add(half * L + limb).cast::<i32>().add(row * LANES));
                    if !SYMMETRIC {
                        let minus_sum = *minus_sums.add(row * step * L + limb);
                        *digit = V::add(*digit, V::times(p.zeros_of(panel, block, half), minus_sum));
                    }
                }
                let to = out.add(row * PANEL + half * LANES);
                let sum = V::fma(value_of::<V, L>(digits), V::mul(scales[half], scale), V::load(to));
                V::store(to, sum);
            }
        }
    }
}
