//! Criterion benches of the core: `cargo bench -p loopq-core`, or `cargo bench -p loopq-core -- hessian/bf16` for one.
//!
//! Throughputs are in operations (`Gelem/s` read as Gflop/s) where arithmetic is the limit, in bytes where memory is.
//! `benches/python/bench_core.py` compares loopq with the alternatives that a user could run instead.
#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use loopq_core::coordinate::{coordinate, coupled, Settings as Coordinate};
use loopq_core::dump::{RowType, Rows};
use loopq_core::factor::{eigvalsh, DampedFactor, DampedHessian, Order, Symmetric};
use loopq_core::gptq::{gptq, Options, Scales};
use loopq_core::grid::{Grid, ScaleType, Search, Table, Trellis, Units, Values};
use loopq_core::hessian::{Accumulator, Settings};
use loopq_core::simd::{tile_pairs, Isa, Real, MR};
use loopq_core::trellis::solve as solve_trellis;
use loopq_core::{pack, Cancel, Execution, Weight};

/// Numbers between -1 and 1 that look random and are the same every time.
fn numbers(n: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The register tiles with both operands in the first-level cache: the roof of everything else.
fn tiles(c: &mut Criterion) {
    const K: usize = 64;
    let mut group = c.benchmark_group("tile");
    for isa in Isa::available() {
        group.throughput(Throughput::Elements((2 * K * MR * f32::NR) as u64));
        let (a, b) = (numbers(K * 48), numbers(K * 48));
        let mut out = vec![0.0_f32; MR * 48];
        group.bench_function(BenchmarkId::new("f32", isa.name()), |bench| {
            bench.iter(|| f32::tile(isa, K, black_box(&a), 48, black_box(&b), 48, &mut out, 48));
        });
        if isa.has_pairs() {
            group.throughput(Throughput::Elements((4 * K * MR * f32::NR) as u64));
            let (a, b) = (vec![0x3f80_3f80_u32; K * 48], vec![0x3f80_3f80_u32; K * 48]);
            group.bench_function(BenchmarkId::new("bf16", isa.name()), |bench| {
                bench.iter(|| tile_pairs(isa, K, black_box(&a), black_box(&b), &mut out, false));
            });
        }
        group.throughput(Throughput::Elements((2 * K * MR * f64::NR) as u64));
        let wide: Vec<f64> = a.iter().map(|&v| f64::from(v)).collect();
        let mut out = vec![0.0_f64; MR * 24];
        group.bench_function(BenchmarkId::new("f64", isa.name()), |bench| {
            bench.iter(|| f64::tile(isa, K, black_box(&wide), 24, black_box(&wide), 24, &mut out, 24));
        });
    }
    group.finish();
}

/// Rows to exact Hessian; operations counted on the upper triangle, the half that is computed.
fn hessian(c: &mut Criterion) {
    const ROWS: usize = 4096;
    let mut group = c.benchmark_group("hessian");
    for dim in [512, 2048, 5280] {
        let single = numbers(ROWS * dim);
        let narrow: Vec<u16> = single.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        group.throughput(Throughput::Elements((ROWS * dim * (dim + 1)) as u64));
        for threads in [1, 2] {
            let mut run = |name: &str, rows: Rows<'_>| {
                let settings = Settings { dim, steps: vec![0], per_step: false, threads, isa: Isa::best() };
                group.bench_function(BenchmarkId::new(format!("{name}/threads={threads}"), dim), |bench| {
                    // A new accumulator each time, as each layer has: its first touches of memory are part of the cost.
                    bench.iter(|| {
                        let mut sum = Accumulator::new(settings.clone()).unwrap();
                        sum.update(0, rows, &Cancel::new()).unwrap();
                        sum.finish(&Cancel::new()).unwrap();
                    });
                });
            };
            run("f32", Rows::from_f32(&single, ROWS, dim).unwrap());
            run("bf16", Rows::from_bits16(&narrow, RowType::Bf16, ROWS, dim).unwrap());
        }
    }
    group.finish();
}

/// A well-conditioned Hessian of correlated inputs.
fn gram(dim: usize) -> Vec<f64> {
    let base = numbers(dim);
    let mut h = vec![0.0; dim * dim];
    for i in 0..dim {
        for j in 0..dim {
            h[i * dim + j] = f64::from(base[i] * base[j]) + if i == j { 1.0 } else { 0.0 };
        }
    }
    h
}

/// Factor and solve.
fn solve(c: &mut Criterion) {
    let mut group = c.benchmark_group("solve");
    for dim in [1024, 2048] {
        let (h, w) = (gram(dim), numbers(dim * dim));
        let (h, w) = (Symmetric::f64(&h, dim).unwrap(), Weight::new("W", &w, dim, dim).unwrap());
        let mu = vec![0.01; dim];
        let grid = Grid {
            bits: 4,
            group_size: 128,
            symmetric: true,
            signed: false,
            scale_type: ScaleType::F32,
            search: Search::Max,
            values: Values::Even,
        };
        let options = Options { scales: Scales::Group, block_size: 128, beam: 1, isa: Isa::best() };
        let cancel = Cancel::new();
        for threads in [1, 2] {
            let on = Execution { threads, cancel: &cancel };
            let name = |what: &str| BenchmarkId::new(format!("{what}/threads={threads}"), dim);
            let single = || DampedFactor::<f32>::new(h, &mu, Order::Natural, &on).unwrap();
            let double = || DampedFactor::<f64>::new(h, &mu, Order::Natural, &on).unwrap();
            group.throughput(Throughput::Elements((dim as u64).pow(3) / 3));
            group.bench_function(name("factor-f32"), |bench| bench.iter(single));
            group.bench_function(name("factor-f64"), |bench| bench.iter(double));
            group.throughput(Throughput::Elements((dim as u64).pow(3)));
            let factor = single();
            group.bench_function(name("gptq-f32"), |bench| {
                bench.iter(|| gptq(w, &factor, &grid, &options, &on).unwrap());
            });
            let factor = double();
            group.bench_function(name("gptq-f64"), |bench| {
                bench.iter(|| gptq(w, &factor, &grid, &options, &on).unwrap());
            });
        }
    }
    group.finish();
}

/// Grids of the default solver.
fn grids() -> [(&'static str, Grid); 4] {
    let even = Grid {
        bits: 3,
        group_size: 64,
        symmetric: true,
        signed: true,
        scale_type: ScaleType::F16,
        search: Search::Mse,
        values: Values::Even,
    };
    let levels = |all: &[i8]| Values::Table(Table::new(all).unwrap());
    let fp4 = [-96, -64, -48, -32, -24, -16, -8, 0, 8, 16, 24, 32, 48, 64, 96];
    let units = ScaleType::Units(Units::new(8, (0, 63), 63, 1).unwrap());
    let q4_k = Grid { bits: 4, group_size: 32, symmetric: false, signed: false, scale_type: units, ..even };
    [
        ("even", even),
        ("uneven", Grid { values: levels(&[-124, -69, -34, -6, 18, 46, 79, 127]), ..even }),
        (
            "fp4",
            Grid {
                bits: 4,
                group_size: 16,
                signed: false,
                scale_type: ScaleType::E4m3 { exponent: -11 },
                values: levels(&fp4),
                ..even
            },
        ),
        ("q4_k", q4_k),
    ]
}

/// Factor in the conditional order, and the default solver, whose sweeps depend on the numbers: weights a second.
fn descent(c: &mut Criterion) {
    const ROWS: usize = 128;
    const DIM: usize = 768;
    let mut group = c.benchmark_group("coordinate");
    let (h, a, w) = (gram(DIM), gram(ROWS), numbers(ROWS * DIM));
    let (h, a) = (Symmetric::f64(&h, DIM).unwrap(), Symmetric::f64(&a, ROWS).unwrap());
    let w = Weight::new("W", &w, ROWS, DIM).unwrap();
    let cancel = Cancel::new();
    for threads in [1, 2] {
        let on = Execution { threads, cancel: &cancel };
        let make = || DampedFactor::<f64>::new(h, &[0.01; DIM], Order::Conditional, &on).unwrap();
        group.throughput(Throughput::Elements((DIM as u64).pow(3) / 3));
        group.bench_function(format!("factor/threads={threads}"), |bench| bench.iter(make));
        group.throughput(Throughput::Elements((ROWS * DIM) as u64));
        let (factor, left) =
            (make(), DampedFactor::<f64>::new(a, &[0.0; ROWS], Order::Conditional, &on).unwrap());
        let (input, left) =
            (DampedHessian::new(h, &factor).unwrap(), [DampedHessian::new(a, &left).unwrap()]);
        for (name, grid) in grids() {
            let settings = Coordinate { grid, beam: 16, sweeps: 30, rounds: 1, refit: true };
            group.bench_function(format!("plain/{name}/threads={threads}"), |bench| {
                bench.iter(|| coordinate(w, &input, &settings, &on).unwrap());
            });
            group.bench_function(format!("coupled/{name}/threads={threads}"), |bench| {
                bench.iter(|| coupled(w, &input, &left, &settings, 2, &on).unwrap());
            });
        }
    }
    group.finish();
}

/// Codes on a trellis: weights a second, rows apart or coupled.
fn trellis(c: &mut Criterion) {
    const ROWS: usize = 128;
    const DIM: usize = 64;
    let mut group = c.benchmark_group("trellis");
    let (h, coupled) = (gram(DIM), gram(ROWS));
    let mut eye = vec![0.0; ROWS * ROWS];
    (0..ROWS).for_each(|i| eye[i * (ROWS + 1)] = 1.0);
    let w = numbers(ROWS * DIM);
    let w = Weight::new("W", &w, ROWS, DIM).unwrap();
    let cancel = Cancel::new();
    let on = Execution { threads: 1, cancel: &cancel };
    let h = Symmetric::f64(&h, DIM).unwrap();
    let factor = DampedFactor::<f64>::new(h, &[0.01; DIM], Order::Conditional, &on).unwrap();
    let input = DampedHessian::new(h, &factor).unwrap();
    group.throughput(Throughput::Elements((ROWS * DIM) as u64));
    for (name, a) in [("apart", &eye), ("coupled", &coupled)] {
        let a = Symmetric::f64(a, ROWS).unwrap();
        let left = DampedFactor::<f64>::new(a, &[0.0; ROWS], Order::Natural, &on).unwrap();
        let left = [DampedHessian::new(a, &left).unwrap()];
        for (bits, state_bits) in [(2, 10), (3, 10), (4, 10), (2, 15), (3, 15), (4, 15), (2, 16)] {
            let values = Values::Trellis(Trellis::new(bits, state_bits, 512).unwrap());
            let grid = Grid {
                bits,
                group_size: DIM,
                symmetric: true,
                signed: false,
                scale_type: ScaleType::F16,
                search: Search::Mse,
                values,
            };
            group.bench_function(format!("{name}/{bits} bits/{state_bits} state bits"), |bench| {
                bench.iter(|| solve_trellis(w, &input, &left, &grid, &on).unwrap());
            });
        }
    }
    group.finish();
}

/// Eigenvalues of a Hessian, all of them.
fn spectrum(c: &mut Criterion) {
    let mut group = c.benchmark_group("eigvalsh");
    let cancel = Cancel::new();
    for dim in [512, 1024] {
        let h = gram(dim);
        for threads in [1, 2] {
            group.throughput(Throughput::Elements((dim as u64).pow(3) * 4 / 3));
            group.bench_function(BenchmarkId::new(format!("threads={threads}"), dim), |bench| {
                let on = Execution { threads, cancel: &cancel };
                bench.iter(|| eigvalsh(Symmetric::f64(&h, dim).unwrap(), &on).unwrap());
            });
        }
    }
    group.finish();
}

/// Codes to words and back; bytes counted are those of the codes, one per code. `copy` is the roof.
fn packing(c: &mut Criterion) {
    const ROWS: usize = 2048;
    const DIM: usize = 5280;
    let codes: Vec<u8> = (0..ROWS * DIM).map(|i| (i * 7 % 4) as u8).collect();
    let mut group = c.benchmark_group("pack");
    group.throughput(Throughput::Bytes((ROWS * DIM) as u64));
    group.bench_function("copy", |bench| bench.iter(|| black_box(&codes).clone()));
    for bits in [2, 3, 4, 8] {
        group.bench_function(BenchmarkId::new("dense", bits), |bench| {
            bench.iter(|| pack::dense::pack(black_box(&codes), ROWS, DIM, bits).unwrap());
        });
        let packed = pack::dense::pack(&codes, ROWS, DIM, bits).unwrap();
        group.bench_function(BenchmarkId::new("unpack-dense", bits), |bench| {
            bench.iter(|| pack::dense::unpack(black_box(&packed), ROWS, DIM, bits).unwrap());
        });
    }
    group.bench_function("marlin", |bench| {
        bench.iter(|| pack::marlin::pack(black_box(&codes), DIM, ROWS).unwrap());
    });
    let packed = pack::marlin::pack(&codes, DIM, ROWS).unwrap();
    group.bench_function("unpack-marlin", |bench| {
        bench.iter(|| pack::marlin::unpack(black_box(&packed), DIM, ROWS).unwrap());
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = tiles, hessian, solve, descent, trellis, spectrum, packing
}
criterion_main!(benches);
