//! Laws for any input: the fast paths against plain ones, and independence of cuts and threads.
#![allow(clippy::unwrap_used, clippy::many_single_char_names, clippy::cast_precision_loss)]

use std::sync::LazyLock;

use loopq_core::coordinate;
use loopq_core::dump::{RowType, Rows};
use loopq_core::factor::{count_above, eigvalsh, DampedFactor, DampedHessian, Order, Symmetric};
use loopq_core::gptq::{gptq, Options, Scales};
use loopq_core::grid::{
    add_offsets, dequantize, fitted, rtn, Grid, Quantized, ScaleType, Search, Table, Units, Values,
};
use loopq_core::hessian::{Accumulator, Settings};
use loopq_core::pack::{dense, marlin, w4};
use loopq_core::simd::{Isa, Real, MR};
use loopq_core::{proxy, Cancel, Execution, Weight};
use proptest::prelude::*;

static CANCEL: LazyLock<Cancel> = LazyLock::new(Cancel::new);

/// That many threads, never cancelled.
fn on(threads: usize) -> Execution<'static> {
    Execution { threads, cancel: &CANCEL }
}

/// Reproducible numbers in -1..1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn settings(dim: usize, threads: usize, isa: Isa) -> Settings {
    Settings { dim, steps: vec![0, 3], per_step: true, threads, isa }
}

/// `X^T X / n + 0.3` in double precision, from correlated rows.
fn hessian(dim: usize, n: usize, seed: u64) -> Vec<f64> {
    let mut x = noise(n * dim, seed);
    for row in x.chunks_exact_mut(dim) {
        for j in 1..dim {
            row[j] += 0.7 * row[j - 1];
        }
    }
    let mut h = vec![0.3; dim * dim];
    for row in x.chunks_exact(dim) {
        for i in 0..dim {
            for j in 0..dim {
                h[i * dim + j] += f64::from(row[i]) * f64::from(row[j]) / n as f64;
            }
        }
    }
    h
}

fn grid(bits: u32, group_size: usize) -> Grid {
    let (scale_type, search) = (ScaleType::F32, Search::Max);
    Grid { bits, group_size, symmetric: true, signed: false, scale_type, search, values: Values::Even }
}

/// A Hessian with a fraction of its mean diagonal as damping, factored.
fn factor<T: Real>(h: &[f64], dim: usize, fraction: f64, order: Order, threads: usize) -> DampedFactor<T> {
    let mean = (0..dim).map(|i| h[i * dim + i]).sum::<f64>() / dim as f64;
    let h = Symmetric::f64(h, dim).unwrap();
    DampedFactor::new(h, &vec![fraction * mean; dim], order, &on(threads)).unwrap()
}

fn weight(values: &[f32], dim: usize) -> Weight<'_> {
    Weight::new("W", values, values.len() / dim, dim).unwrap()
}

fn solve<T: Real>(
    w: &[f32],
    h: &[f64],
    dim: usize,
    grid: &Grid,
    options: Options,
    threads: usize,
) -> Quantized {
    let factor = factor::<T>(h, dim, 0.01, Order::Natural, threads);
    gptq(weight(w, dim), &factor, grid, &options, &on(threads)).unwrap().0
}

fn options(scales: Scales, block_size: usize, isa: Isa) -> Options {
    Options { scales, block_size, beam: 1, isa }
}

/// GPTQ as it was published: upper Cholesky factor of the inverse, in plain double precision.
fn inverse_form(w: &[f32], h: &[f64], dim: usize, bits: u32, group: usize) -> (Vec<i32>, Vec<f32>) {
    let mean: f64 = (0..dim).map(|i| h[i * dim + i]).sum::<f64>() / dim as f64;
    let mut m: Vec<f64> = h.to_vec();
    (0..dim).for_each(|i| m[i * dim + i] += 0.01 * mean);
    let inverse = invert(&m, dim);
    let u = upper_cholesky(&inverse, dim);
    let top = f64::from((1 << (bits - 1)) - 1);
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for row in w.chunks_exact(dim) {
        let mut v: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        let mut scale = 0.0_f32;
        for j in 0..dim {
            if j % group == 0 {
                let max = v[j..dim.min(j + group)].iter().fold(0.0_f64, |a, b| a.max(b.abs()));
                scale = (max / top) as f32;
                scales.push(scale);
            }
            let q = (v[j] / f64::from(scale)).round_ties_even().clamp(-top - 1.0, top);
            codes.push(q as i32);
            let e = (v[j] - f64::from(q as f32 * scale)) / u[j * dim + j];
            for k in j + 1..dim {
                v[k] -= e * u[j * dim + k];
            }
        }
    }
    (codes, scales)
}

fn invert(m: &[f64], n: usize) -> Vec<f64> {
    let mut a = m.to_vec();
    let mut b: Vec<f64> = (0..n * n).map(|i| f64::from(u8::from(i / n == i % n))).collect();
    for p in 0..n {
        let d = a[p * n + p];
        for j in 0..n {
            a[p * n + j] /= d;
            b[p * n + j] /= d;
        }
        for i in (0..n).filter(|&i| i != p) {
            let f = a[i * n + p];
            for j in 0..n {
                a[i * n + j] -= f * a[p * n + j];
                b[i * n + j] -= f * b[p * n + j];
            }
        }
    }
    b
}

/// `U` upper with `U^T U = m`.
fn upper_cholesky(m: &[f64], n: usize) -> Vec<f64> {
    let mut u = vec![0.0; n * n];
    for i in 0..n {
        for j in i..n {
            let sum: f64 = (0..i).map(|k| u[k * n + i] * u[k * n + j]).sum();
            u[i * n + j] =
                if i == j { (m[i * n + i] - sum).sqrt() } else { (m[i * n + j] - sum) / u[i * n + i] };
        }
    }
    u
}

#[test]
fn tiles_have_the_bits_of_the_portable_chain() {
    fn check<T: Real + PartialEq>(k: usize) {
        let real =
            |n: usize, seed| noise(n, seed).into_iter().map(|v| T::of(f64::from(v))).collect::<Vec<T>>();
        let (lda, ldb, ldc) = (MR + 3, T::NR + 1, T::NR + 5);
        let (a, b, c) = (real((k + 1) * lda, 1), real((k + 1) * ldb, 2), real(MR * ldc, 3));
        let mut expected = c.clone();
        T::tile(Isa::PORTABLE, k, &a, lda, &b, ldb, &mut expected, ldc);
        for isa in Isa::available() {
            let mut got = c.clone();
            T::tile(isa, k, &a, lda, &b, ldb, &mut got, ldc);
            assert!(got == expected, "{} {} k = {k}", isa.name(), T::NAME);
        }
    }
    for k in [0, 1, 2, 3, 7, 64, 65] {
        check::<f32>(k);
        check::<f64>(k);
    }
}

#[test]
fn tiles_refuse_operands_outside_their_slices() {
    let (a, b) = ([1.0_f32; 64], [1.0_f32; 512]);
    for isa in Isa::available() {
        let refused = |k: usize, lda: usize, ldb: usize| {
            let run = || f32::tile(isa, k, &a, lda, &b, ldb, &mut [0.0; 8 * 48], 48);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
        };
        assert!(!refused(2, 8, 48), "{}", isa.name());
        assert!(refused(9, 8, 48) && refused(2, 8, 500), "{}", isa.name());
        // Strides with products that wrap round to a small number.
        if isa != Isa::PORTABLE {
            assert!(
                refused((1 << 32) + 1, 1 << 32, 1 << 32) && refused(3, usize::MAX / 2 + 1, 48),
                "{}",
                isa.name()
            );
        }
    }
}

/// `a b + c` and `a + b`, rounded once; results that would be subnormal with an unbounded exponent count as zero.
fn flushed_fma(a: f32, b: f32, c: f32) -> f32 {
    let normal = |v: f32| if v.is_subnormal() { 0.0 } else { v };
    let (a, b, c) = (normal(a), normal(b), normal(c));
    // Exact where it matters: near the smallest normal number both terms reach down to 2^-166 at most.
    let wide = f64::from(a) * f64::from(b) + f64::from(c);
    if wide.abs() < f64::from(f32::MIN_POSITIVE) * (1.0 - 0.5_f64.powi(25)) {
        return 0.0;
    }
    a.mul_add(b, c)
}

/// The sum of products of a block of bf16 rows, as `docs/formats/hessian.md` says it.
fn sum_of_chains(x: &[f32], dim: usize, i: usize, j: usize) -> f32 {
    let chain = |rows: &[f32]| rows.chunks_exact(dim).fold(0.0, |sum, row| flushed_fma(row[i], row[j], sum));
    x.chunks(32 * dim).fold(0.0, |sum, group| {
        let (one, other) = group.split_at((16 * dim).min(group.len()));
        flushed_fma(1.0, sum, flushed_fma(1.0, chain(one), chain(other)))
    })
}

/// Bits of bf16 numbers of one of four kinds: near one; any size within the limit, with cancellations; products at the
/// end of the normal range; the largest numbers beside zeros, subnormal numbers and the smallest normal ones.
fn brains(n: usize, kind: usize, seed: u64) -> Vec<u16> {
    let chance = noise(3 * n, seed);
    let value = |c: &[f32]| {
        let pick = |v: f32, n: u16| (((0.5 * v + 0.5) * f32::from(n)) as u16).min(n - 1);
        let exponent = match kind {
            0 => 120 + pick(c[0], 8),
            1 => 60 + pick(c[0], 90),
            2 => 62 + pick(c[0], 4),
            _ => [0, 1, 20, 63, 64, 107, 149][usize::from(pick(c[0], 7))],
        };
        let fraction = if c[1] < -0.5 { 0 } else { pick(c[1], 128) };
        u16::from(c[2] < 0.0) << 15 | exponent << 7 | fraction
    };
    chance.chunks_exact(3).map(value).collect()
}

/// The exact state of one block.
fn block_of(bits: &[u16], dim: usize, isa: Isa, threads: usize) -> Accumulator {
    let mut sum = Accumulator::new(settings(dim, threads, isa)).unwrap();
    let rows = Rows::from_bits16(bits, RowType::Bf16, bits.len() / dim, dim).unwrap();
    sum.update(0, rows, &CANCEL).unwrap();
    sum.finish(&CANCEL).unwrap();
    sum
}

/// Even levels, and levels of a table.
fn levels() -> impl Strategy<Value = Values> {
    let table = Table::new(&[-124, -69, -34, -6, 18, 46, 79, 127]).unwrap();
    prop::sample::select(vec![Values::Even, Values::Table(table)])
}

#[test]
fn every_weight_gets_the_nearest_level() {
    let levels: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    let values = Values::Table(Table::new(&levels).unwrap());
    let (rows, dim, group) = (6, 200, 64);
    let w = noise(rows * dim, 8);
    for search in [Search::Max, Search::Mse] {
        let grid = Grid { search, values, signed: true, ..grid(4, group) };
        let q = rtn(weight(&w, dim), &grid, &on(2)).unwrap();
        for (at, (&code, &value)) in q.codes.iter().zip(&w).enumerate() {
            let scale = q.scales[at / dim * dim.div_ceil(group) + at % dim / group].scale;
            let error = |level: i8| (f64::from(value) - f64::from(level) / 16.0 * f64::from(scale)).abs();
            let least = levels.iter().map(|&level| error(level)).fold(f64::INFINITY, f64::min);
            assert!(error(levels[usize::from(code)]) <= least * (1.0 + 1e-9), "{code} for {value}");
        }
    }
}

#[test]
fn fitted_levels_have_at_most_the_error_of_their_start() {
    let start = Table::new(&[-127, -40, 40, 127]).unwrap();
    let (rows, dim) = (50, 96);
    // Most weights are small, and the large ones are on one side.
    let w: Vec<f32> =
        noise(rows * dim, 3).iter().map(|v| if *v > 0.8 { *v } else { v * v * v * 0.3 }).collect();
    let energies: Vec<f64> = (0..dim).map(|j| 1.0 + (j % 7) as f64).collect();
    let of = |table| Grid { search: Search::Mse, values: Values::Table(table), signed: true, ..grid(2, 32) };
    let loss = |table| {
        let q = rtn(weight(&w, dim), &of(table), &on(1)).unwrap();
        let hat =
            dequantize(&q.codes, |c| table.level(c), &q.scales().unwrap(), None, rows, dim, 32).unwrap();
        hat.iter().zip(&w).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    };
    let even = vec![1.0; dim];
    let found = fitted(weight(&w, dim), &even, &of(start), &on(1)).unwrap();
    assert!(loss(found) < 0.9 * loss(start));
    assert_eq!(found, fitted(weight(&w, dim), &even, &of(start), &on(4)).unwrap());
    assert_ne!(found, fitted(weight(&w, dim), &energies, &of(start), &on(1)).unwrap());
    assert!(fitted(weight(&w, dim), &even, &grid(2, 32), &on(1)).is_err());
    assert!(fitted(weight(&w, dim), &even[1..], &of(start), &on(1)).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn cuts_threads_and_vector_width_leave_no_trace(
        dim in 1_usize..130, n in 1_usize..1500, cuts in prop::collection::vec(1_usize..700, 1..5), seed in 0_u64..99,
    ) {
        let x = noise(n * dim, seed);
        let mut reference = Accumulator::new(settings(dim, 1, Isa::PORTABLE)).unwrap();
        reference.update(3, Rows::from_f32(&x, n, dim).unwrap(), &CANCEL).unwrap();
        reference.finish(&CANCEL).unwrap();
        for isa in Isa::available() {
            let mut other = Accumulator::new(settings(dim, 2, isa)).unwrap();
            let (mut from, mut cut) = (0, cuts.iter().cycle());
            while from < n {
                let m = (*cut.next().unwrap()).min(n - from);
                other.update(3, Rows::from_f32(&x[from * dim..(from + m) * dim], m, dim).unwrap(), &CANCEL).unwrap();
                from += m;
            }
            other.finish(&CANCEL).unwrap();
            prop_assert_eq!(other.state(&CANCEL).unwrap(), reference.state(&CANCEL).unwrap());
        }
    }

    #[test]
    fn bf16_sums_have_the_defined_bits_on_every_instruction_set(
        dim in 1_usize..120, n in 1_usize..1100, kind in 0_usize..4, seed in 0_u64..99,
    ) {
        let bits = brains(n * dim, kind, seed);
        let x: Vec<f32> = bits.iter().map(|&b| half::bf16::from_bits(b).to_f32()).collect();
        let reference = block_of(&bits, dim, Isa::PORTABLE, 1);
        let h = reference.matrix(Some(&[0]), &CANCEL).unwrap();
        for (i, j) in [(0, 0), (0, dim - 1), (dim / 2, dim - 1), (dim - 1, dim - 1)] {
            let sum: f64 = x.chunks(512 * dim).map(|block| f64::from(sum_of_chains(block, dim, i, j))).sum();
            let size: f64 = x.chunks(512 * dim).map(|block| f64::from(sum_of_chains(block, dim, i, j)).abs()).sum();
            prop_assert!((h[i * dim + j] - sum).abs() <= 4e-16 * size + 2e-18, "{i}, {j}");
        }
        for isa in Isa::available() {
            let other = block_of(&bits, dim, isa, 2);
            prop_assert_eq!(other.state(&CANCEL).unwrap(), reference.state(&CANCEL).unwrap(), "{}", isa.name());
        }
    }

    #[test]
    fn every_row_type_stays_within_the_stated_bound(dim in 1_usize..70, n in 1_usize..1200, seed in 0_u64..99) {
        let x = noise(n * dim, seed);
        let half: Vec<half::f16> = x.iter().map(|&v| half::f16::from_f32(v)).collect();
        let brain: Vec<half::bf16> = x.iter().map(|&v| half::bf16::from_f32(v)).collect();
        let bits: Vec<u16> = brain.iter().map(|v| v.to_bits()).collect();
        let wide = |v: &dyn Fn(usize) -> f64| (0..n * dim).map(v).collect::<Vec<f64>>();
        let cases = [
            (Rows::from_f32(&x, n, dim).unwrap(), wide(&|i| f64::from(x[i]))),
            (Rows::from_f16(&half, n, dim).unwrap(), wide(&|i| half[i].to_f64())),
            (Rows::from_bits16(&bits, RowType::Bf16, n, dim).unwrap(), wide(&|i| brain[i].to_f64())),
        ];
        for (rows, exact) in cases {
            for isa in Isa::available() {
                let mut a = Accumulator::new(settings(dim, 1, isa)).unwrap();
                a.update(0, rows, &CANCEL).unwrap();
                a.finish(&CANCEL).unwrap();
                let h = a.matrix(Some(&[0]), &CANCEL).unwrap();
                for i in 0..dim {
                    for j in 0..dim {
                        let products = exact.chunks_exact(dim).map(|r| r[i] * r[j]);
                        let (sum, size) = products.fold((0.0, 0.0), |(s, z), p| (s + p, z + p.abs()));
                        prop_assert!((h[i * dim + j] - sum).abs() <= 3.06e-5 * size + 1e-20);
                        prop_assert!(h[i * dim + j].to_bits() == h[j * dim + i].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn merging_is_associative_commutative_and_exact(dim in 1_usize..60, seed in 0_u64..99) {
        let part = |s: u64, n: usize| {
            let x = noise(n * dim, seed + s);
            let mut a = Accumulator::new(settings(dim, 1, Isa::best())).unwrap();
            a.update(0, Rows::from_f32(&x, n, dim).unwrap(), &CANCEL).unwrap();
            a.update(3, Rows::from_f32(&x[..dim], 1, dim).unwrap(), &CANCEL).unwrap();
            a.finish(&CANCEL).unwrap();
            a
        };
        let (a, b, c) = (part(1, 5), part(2, 600), part(3, 40));
        let again = |of: &Accumulator| Accumulator::from_state(&of.state(&CANCEL).unwrap(), 1, &CANCEL).unwrap();
        let mut left = again(&a);
        left.merge(&b, &CANCEL).unwrap();
        left.merge(&c, &CANCEL).unwrap();
        let mut right = again(&c);
        right.merge(&a, &CANCEL).unwrap();
        let mut last = again(&b);
        last.merge(&right, &CANCEL).unwrap();
        prop_assert_eq!(left.state(&CANCEL).unwrap(), last.state(&CANCEL).unwrap());
        prop_assert_eq!(left.n_rows(0).unwrap(), 645);
    }

    #[test]
    fn codes_are_those_of_the_inverse_form(
        dim in 1_usize..80, rows in 1_usize..60, bits in prop::sample::select(vec![2_u32, 3, 4, 8]),
        group in 1_usize..90, seed in 0_u64..99,
    ) {
        let (w, h) = (noise(rows * dim, seed), hessian(dim, 2 * dim, seed + 1));
        let got = solve::<f64>(&w, &h, dim, &grid(bits, group), options(Scales::Group, 128, Isa::best()), 1);
        let (codes, scales) = inverse_form(&w, &h, dim, bits, group);
        let middle = 1_i32 << (bits - 1);
        let differ = got.codes.iter().zip(&codes).filter(|(&u, &q)| i32::from(u) - middle != q).count();
        // A value that lies on a rounding boundary to the last bits may go either way and take its row along.
        prop_assert!(differ * 50 <= codes.len(), "{differ} of {} codes", codes.len());
        if differ == 0 {
            prop_assert!(got.scales().unwrap().iter().zip(&scales).all(|(a, b)| (a - b).abs() <= 2e-7 * b.abs()));
        }
    }

    #[test]
    fn blocks_threads_and_vector_width_change_no_code(
        dim in 1_usize..260, rows in 1_usize..110, group in 1_usize..140, block in 1_usize..300, seed in 0_u64..99,
        scales in prop::sample::select(vec![Scales::Group, Scales::Static]),
        search in prop::sample::select(vec![Search::Max, Search::Mse]), values in levels(),
    ) {
        let (w, h) = (noise(rows * dim, seed), hessian(dim, 40, seed + 1));
        let grid = Grid { search, values, signed: true, ..grid(3, group) };
        let expected = solve::<f32>(&w, &h, dim, &grid, options(scales, 128, Isa::PORTABLE), 1);
        for isa in Isa::available() {
            let got = solve::<f32>(&w, &h, dim, &grid, options(scales, block, isa), 2);
            prop_assert!(got == expected, "{}", isa.name());
        }
    }

    #[test]
    fn threads_and_vector_width_change_no_path(
        dim in 1_usize..260, rows in 1_usize..30, group in 1_usize..140, seed in 0_u64..99,
        beam in prop::sample::select(vec![2_usize, 7, 16]), symmetric in prop::bool::ANY, values in levels(),
    ) {
        let (w, h) = (noise(rows * dim, seed), hessian(dim, 40, seed + 1));
        let symmetric = symmetric || values != Values::Even;
        let grid = Grid { search: Search::Mse, symmetric, values, ..grid(3, group) };
        let options = |isa| Options { beam, ..options(Scales::Static, 128, isa) };
        let expected = solve::<f64>(&w, &h, dim, &grid, options(Isa::PORTABLE), 1);
        for isa in Isa::available() {
            let got = solve::<f64>(&w, &h, dim, &grid, options(isa), 2);
            prop_assert!(got == expected, "{}", isa.name());
        }
    }

    #[test]
    fn packing_round_trips(rows in 0_usize..5, dim in 1_usize..200, bits in prop::sample::select(vec![2_u32, 3, 4, 8])) {
        let codes: Vec<u8> = noise(rows * dim, 9).iter().map(|v| ((v + 1.0) * 127.0) as u8 & ((1 << bits) - 1) as u8).collect();
        let packed = dense::pack(&codes, rows, dim, bits).unwrap();
        prop_assert_eq!(dense::unpack(&packed, rows, dim, bits).unwrap(), codes);
    }

    #[test]
    fn marlin_round_trips(k in 1_usize..6, n in 1_usize..4, groups in 1_usize..4) {
        let (k, n) = (16 * k, 64 * n);
        let codes: Vec<u8> = noise(k * n, 3).iter().map(|v| ((v + 1.0) * 7.9) as u8).collect();
        prop_assert_eq!(marlin::unpack(&marlin::pack(&codes, k, n).unwrap(), k, n).unwrap(), codes);
        let scales = noise(n * groups, 4);
        let stored = marlin::pack_scales(&scales, n, groups).unwrap();
        prop_assert_eq!(marlin::unpack_scales(&stored, n, groups).unwrap(), scales);
    }

    #[test]
    fn kernel_packing_round_trips(k in 1_usize..7, n in 1_usize..6, threads in 1_usize..4) {
        let (k, n) = (32 * k, 16 * n);
        let codes: Vec<u8> = noise(k * n, 3).iter().map(|v| ((v + 1.0) * 7.9) as u8).collect();
        let packed = w4::pack(&codes, n, k, &on(threads)).unwrap();
        prop_assert_eq!(&w4::unpack(&packed, n, k, &on(threads)).unwrap(), &codes);
        // One code per place of the specification (kernels/README.md), the rest zero.
        let tiles = k.div_ceil(64);
        let mut by_formula = vec![0x8888_8888_u32; packed.len()];
        for row in 0..n {
            for column in 0..k {
                let word = ((row >> 4) * tiles + (column >> 6)) * 128
                    + (4 * (row & 7) + ((column & 7) >> 1)) * 4 + ((column >> 4) & 3);
                let nibble = 2 * ((row >> 3) & 1) + ((column >> 3) & 1) + 4 * (column & 1);
                by_formula[word] ^= u32::from(codes[row * k + column] ^ 8) << (4 * nibble);
            }
        }
        prop_assert_eq!(packed, by_formula);
    }
}

#[test]
fn sum_over_steps_is_the_sum() {
    let (dim, n) = (37, 900);
    let x = noise(2 * n * dim, 8);
    let rows = |t: usize| Rows::from_f32(&x[t * n * dim..(t + 1) * n * dim], n, dim).unwrap();
    let run = |per_step| {
        let mut a = Accumulator::new(Settings { per_step, ..settings(dim, 2, Isa::best()) }).unwrap();
        a.update(0, rows(0), &CANCEL).unwrap();
        a.update(3, rows(1), &CANCEL).unwrap();
        a.finish(&CANCEL).unwrap();
        a
    };
    let (split, whole) = (run(true), run(false));
    assert_eq!(split.matrix(None, &CANCEL).unwrap(), whole.matrix(None, &CANCEL).unwrap());
    assert_eq!(split.matrix(Some(&[3, 0]), &CANCEL).unwrap(), whole.matrix(None, &CANCEL).unwrap());
    assert_eq!(
        split.weighted(Some(&[0]), &[1.0], &CANCEL).unwrap(),
        split.matrix(Some(&[0]), &CANCEL).unwrap()
    );
    assert!(
        (split.trace(None).unwrap() - split.trace(Some(0)).unwrap() - split.trace(Some(3)).unwrap()).abs()
            < 1e-9
    );
}

#[test]
fn pivots_are_those_of_a_plain_factorisation_across_panels() {
    for dim in [1, 7, 191, 192, 193, 400] {
        let h = hessian(dim, 500, 3);
        let f = factor::<f64>(&h, dim, 0.02, Order::Natural, 2);
        // With its columns turned round, H' = R R^T is an ordinary Cholesky factorisation.
        let mut m: Vec<f64> = h.iter().rev().copied().collect();
        (0..dim).for_each(|i| m[i * dim + i] += f.mu()[0]);
        let u = upper_cholesky(&m, dim);
        for (j, &pivot) in f.pivots().iter().enumerate() {
            let expected = u[(dim - 1 - j) * (dim + 1)].powi(2);
            assert!(
                (pivot - expected).abs() <= 1e-9 * expected,
                "dim {dim}, column {j}: {pivot} and {expected}"
            );
        }
        let one = factor::<f64>(&h, dim, 0.02, Order::Natural, 1);
        assert_eq!(one.pivots(), f.pivots());
    }
}

#[test]
fn identity_gives_rtn_and_scaling_changes_nothing() {
    let (dim, rows) = (100, 50);
    let w = noise(rows * dim, 2);
    let identity: Vec<f64> = (0..dim * dim).map(|i| if i / dim == i % dim { 7.0 } else { 0.0 }).collect();
    for symmetric in [true, false] {
        for search in [Search::Max, Search::Mse] {
            let grid = Grid { symmetric, search, scale_type: ScaleType::Bf16, ..grid(4, 32) };
            let plain = rtn(weight(&w, dim), &grid, &on(1)).unwrap();
            for scales in [Scales::Group, Scales::Static] {
                let got = solve::<f64>(&w, &identity, dim, &grid, options(scales, 16, Isa::best()), 1);
                assert_eq!(got, plain);
            }
        }
    }
    let h = hessian(dim, 300, 4);
    let scaled: Vec<f64> = h.iter().map(|v| v * 1024.0).collect();
    let solved =
        |h: &[f64]| solve::<f64>(&w, h, dim, &grid(4, 32), options(Scales::Group, 128, Isa::best()), 1);
    assert_eq!(solved(&h), solved(&scaled));
}

#[test]
fn short_scales_are_the_nearest_of_so_few_bits() {
    for (name, bits) in [("bfloat16", 5), ("float16", 8), ("float32", 1), ("bfloat16", 8)] {
        let kind = ScaleType::parse(name, Some(bits), 0).unwrap();
        for x in noise(2000, 9).into_iter().map(f32::abs).filter(|&x| x > 1e-3) {
            let got = kind.round(f64::from(x));
            // The distance of neighbours with so many bits, at the power of two below the value.
            let unit = 2_f32.powi(x.log2().floor() as i32 + 1 - bits as i32);
            assert_eq!(got % unit, 0.0, "{name} {x}");
            assert!((got - x).abs() <= unit / 2.0, "{name} {x} {got}");
        }
    }
    let five = ScaleType::parse("bfloat16", Some(5), 0).unwrap();
    // Ties go to the even number: half way between 1.0 and 1.0625, and half way above it.
    assert_eq!([1.03125, 1.09375, 1.99].map(|x| five.round(x)), [1.0, 1.125, 2.0]);
}

#[test]
fn scales_and_offsets_are_whole_units_and_report_their_proxy() {
    let (dim, rows) = (128, 24);
    let (w, h) = (noise(rows * dim, 2), hessian(dim, 300, 4));
    let h_view = Symmetric::f64(&h, dim).unwrap();
    for (groups, scales, offsets) in [(4, (0, 63), 63), (8, (0, 15), 15), (1, (1, 1), 1), (8, (-32, 31), 0)] {
        let units = Units::new(groups, scales, offsets, 1).unwrap();
        let scale_type = ScaleType::Units(units);
        let grid = Grid { scale_type, symmetric: offsets == 0, ..grid(3, 16) };
        let loss = |q: &Quantized| {
            let zeros = q.zeros().unwrap();
            let mut hat =
                dequantize(&q.codes, f32::from, &q.scales().unwrap(), Some(&zeros), rows, dim, 16).unwrap();
            add_offsets(&mut hat, &q.offsets().unwrap(), rows, dim, 16).unwrap();
            proxy(weight(&w, dim), Some(weight(&hat, dim)), h_view, &on(1)).unwrap()
        };
        let mut best = loss(&rtn(weight(&w, dim), &grid, &on(2)).unwrap());
        for (order, scales) in [(Order::Natural, Scales::Group), (Order::Conditional, Scales::Static)] {
            let f = factor::<f64>(&h, dim, 0.01, order, 1);
            let (q, report) =
                gptq(weight(&w, dim), &f, &grid, &options(scales, 128, Isa::best()), &on(1)).unwrap();
            let real = loss(&q);
            assert!((report.proxy - real).abs() <= 1e-5 * real, "{} and {real}", report.proxy);
            assert!(real < best);
        }
        let f = factor::<f64>(&h, dim, 0.01, Order::Conditional, 1);
        let settings = coordinate::Settings { grid, beam: 4, sweeps: 20, rounds: 2, refit: true };
        let input = DampedHessian::new(h_view, &f).unwrap();
        let (q, report) = coordinate::coordinate(weight(&w, dim), &input, &settings, &on(2)).unwrap();
        assert!(report.settled < report.swept && loss(&q) < best);
        best = loss(&q);
        assert!(best < report.settled);
        for row in q.scales.chunks(groups) {
            for one in row {
                assert_eq!(one.units, row[0].units);
                assert!(one.units.iter().all(|&unit| half::f16::from_f32(unit).to_f32() == unit));
                let [scale, offset] = [one.scale / one.units[0], one.offset / one.units[1]];
                assert!(
                    scale.is_nan()
                        || scale.fract() == 0.0
                            && (f32::from(scales.0)..=f32::from(scales.1)).contains(&scale)
                );
                assert!(
                    offset.is_nan() || offset.fract() == 0.0 && (0.0..=f32::from(offsets)).contains(&offset)
                );
            }
        }
    }
    assert!(Units::new(0, (0, 63), 63, 1).is_err() && Units::new(8, (0, 0), 0, 1).is_err());
}

#[test]
fn gptq_beats_rtn_and_reports_the_proxy_it_has() {
    let (dim, rows) = (150, 40);
    let (w, h) = (noise(rows * dim, 2), hessian(dim, 400, 4));
    let h_view = Symmetric::f64(&h, dim).unwrap();
    let loss = |q: &Quantized| {
        let hat =
            dequantize(&q.codes, f32::from, &q.scales().unwrap(), Some(&q.zeros().unwrap()), rows, dim, 50)
                .unwrap();
        proxy(weight(&w, dim), Some(weight(&hat, dim)), h_view, &on(1)).unwrap()
    };
    for order in [Order::Natural, Order::Diagonal, Order::Conditional] {
        let f = factor::<f64>(&h, dim, 0.01, order, 1);
        let options = options(Scales::Static, 128, Isa::best());
        let (q, report) = gptq(weight(&w, dim), &f, &grid(4, 50), &options, &on(1)).unwrap();
        let real = loss(&q);
        assert!((report.proxy - real).abs() <= 1e-9 * real, "{} and {real}", report.proxy);
        let plain = rtn(weight(&w, dim), &grid(4, 50), &on(1)).unwrap();
        assert_eq!(plain.scales, q.scales);
        assert!(real < 0.8 * loss(&plain));
        // Paths are priced in single precision. The columns are three blocks of them.
        let mut before = real;
        for beam in [2, 8, 32] {
            let options = Options { beam, ..options };
            let (q, report) = gptq(weight(&w, dim), &f, &grid(4, 50), &options, &on(1)).unwrap();
            assert_eq!(plain.scales, q.scales);
            let real = loss(&q);
            assert!((report.proxy - real).abs() <= 1e-4 * real, "{beam}: {} and {real}", report.proxy);
            assert!(real < before, "{beam} paths: {real}, fewer: {before}");
            before = real;
        }
    }
}

#[test]
fn rows_of_w_are_independent() {
    let (dim, rows) = (90, 120);
    let (w, h) = (noise(rows * dim, 2), hessian(dim, 400, 4));
    let options = options(Scales::Group, 128, Isa::best());
    let all = solve::<f32>(&w, &h, dim, &grid(4, 32), options, 2);
    for r in [0, 47, 48, 119] {
        let one = solve::<f32>(&w[r * dim..(r + 1) * dim], &h, dim, &grid(4, 32), options, 1);
        assert_eq!(one.codes, all.codes[r * dim..(r + 1) * dim]);
    }
}

#[test]
fn orders_are_those_of_the_plain_rules() {
    let dim = 23;
    let s = hessian(dim, 60, 5);
    let order = |rule| {
        let view = Symmetric::f64(&s, dim).unwrap();
        DampedFactor::<f64>::new(view, &vec![0.0; dim], rule, &on(2)).unwrap().order().to_vec()
    };
    let mut falling: Vec<usize> = (0..dim).collect();
    assert_eq!(order(Order::Natural), falling);
    falling.sort_by(|&i, &j| s[j * dim + j].total_cmp(&s[i * dim + i]));
    assert_eq!(order(Order::Diagonal), falling);
    // The first column is the one whose error the others can compensate least; so is each next one among those left.
    let (mut left, mut best): (Vec<usize>, Vec<usize>) = ((0..dim).collect(), Vec::new());
    while !left.is_empty() {
        let n = left.len();
        let part: Vec<f64> = (0..n * n).map(|i| s[left[i / n] * dim + left[i % n]]).collect();
        let inverse = invert(&part, n);
        let first = (0..n).min_by(|&i, &j| inverse[i * n + i].total_cmp(&inverse[j * n + j])).unwrap();
        best.push(left.remove(first));
    }
    assert_eq!(order(Order::Conditional), best);
}

#[test]
fn eigenvalues_of_a_known_matrix() {
    // The second difference matrix of size n has 2 - 2 cos(k pi / (n + 1)).
    let n = 61_usize;
    let h: Vec<f64> = (0..n * n)
        .map(|i| match (i / n).abs_diff(i % n) {
            0 => 2.0,
            1 => -1.0,
            _ => 0.0,
        })
        .collect();
    let view = Symmetric::f64(&h, n).unwrap();
    let got = eigvalsh(view, &on(2)).unwrap();
    for (k, value) in got.iter().enumerate() {
        let exact = 2.0 - 2.0 * ((k + 1) as f64 * std::f64::consts::PI / (n + 1) as f64).cos();
        assert!((value - exact).abs() < 1e-13);
    }
    let fractions = [0.9, 0.5, 0.1, 0.01, 0.001, 0.0];
    let counts = count_above(view, &fractions, &on(2)).unwrap();
    assert!((counts.largest - got[n - 1]).abs() < 1e-13);
    let expected = fractions.map(|f| got.iter().filter(|&&value| value > f * got[n - 1]).count());
    assert_eq!(counts.above, expected);
    assert_eq!(counts, count_above(view, &fractions, &on(1)).unwrap());
}

#[test]
fn eigenvalues_are_counted_across_panels() {
    for dim in [191, 192, 193, 500] {
        let h = hessian(dim, 300, 9);
        let view = Symmetric::f64(&h, dim).unwrap();
        let values = eigvalsh(view, &on(2)).unwrap();
        let fractions = [0.7, 0.3, 0.1, 1e-2, 1e-3, 1e-4];
        let counts = count_above(view, &fractions, &on(2)).unwrap();
        let expected = fractions.map(|f| values.iter().filter(|&&value| value > f * values[dim - 1]).count());
        assert_eq!(counts.above, expected, "{dim}");
    }
}
