//! Products with packed codes: bits against a plain twin on every instruction set, bounds against double precision.
#![allow(clippy::unwrap_used)]

use half::bf16;
use loopq_core::grid::{value, Grid, ScaleType, Search, Table, Trellis, Values};
use loopq_core::{Cancel, Error, Execution};
use loopq_cpu::matmul::{multiply, pack, unpack, Codes, Engine, Inputs, Layout, Outputs, Plan, Precision};
use proptest::prelude::*;

const PRECISIONS: [Precision; 3] = [Precision::Int8, Precision::Fixed16, Precision::Fixed24];

/// A layer with everything that its product needs, and the same numbers in plain arrays.
#[derive(Debug, Clone)]
struct Layer {
    outputs: usize,
    inputs: usize,
    grid: Grid,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Option<Vec<u8>>,
    /// Bits of a state and rows of a stream, where the codes are on a trellis.
    trellis: Option<(u32, usize)>,
}

fn noise(n: usize, seed: u64) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 20
    };
    (0..n).map(|_| next()).collect()
}

/// Numbers of very different sizes, some zero.
fn activations(n: usize, seed: u64) -> Vec<f32> {
    let number = |v: u64| {
        let size = [0.0, 1.0, 1.0, 0.25, 30.0, 1e-3, 1.0, 4.0][v as usize % 8];
        bf16::from_f32(((v >> 8) % 4001) as f32 / 2000.0 * size - size).to_f32()
    };
    noise(n, seed).into_iter().map(number).collect()
}

impl Layer {
    fn random([outputs, inputs]: [usize; 2], grid: Grid, seed: u64) -> Self {
        let (n, top) = (outputs * grid.n_groups(inputs), 1 << grid.bits);
        let codes = noise(outputs * inputs, seed).iter().map(|v| (v % top) as u8).collect();
        // Few enough digits for all formats of scales.
        let scale = |v: &u64| (1.0 + (v % 64) as f32 / 64.0) * 2.0_f32.powi((v / 64 % 5) as i32 - 8);
        let scales = noise(n, seed + 1).iter().map(scale).collect();
        let zeros = (!grid.symmetric).then(|| noise(n, seed + 2).iter().map(|v| (v % top) as u8).collect());
        Self { outputs, inputs, grid, codes, scales, zeros, trellis: None }
    }

    /// The same codes on a trellis, where there is one of such a grid.
    fn on_trellis(mut self, more_bits: u32, stream_rows: usize) -> Self {
        if self.grid.symmetric && self.grid.bits <= 4 {
            let state_bits = (self.grid.bits + 2 + more_bits).min(16);
            self.trellis = Some((state_bits, stream_rows));
            let trellis = Trellis::new(self.grid.bits, state_bits, stream_rows).unwrap();
            self.grid.values = Values::Trellis(trellis);
        }
        self
    }

    /// The same codes with levels that are not even, where there are tables for so many.
    fn on_table(mut self, seed: u64) -> Self {
        if self.grid.symmetric && self.grid.bits <= 4 {
            let len = 1 << self.grid.bits;
            let gaps: Vec<i32> = noise(len, seed).iter().map(|v| 1 + (v % 14) as i32).collect();
            // At most 14 gaps of 14: every level fits below 127.
            let first = -127 + (noise(1, seed + 1)[0] % 43) as i32;
            let level = |k: usize| (first + gaps[..k].iter().sum::<i32>()) as i8;
            let mut levels: Vec<i8> = (0..len).map(level).collect();
            // The outermost products must fit too.
            (levels[0], levels[len - 1]) = (-127, 127);
            self.grid.values = Values::Table(Table::new(&levels).unwrap());
        }
        self
    }

    fn layout(&self) -> Layout {
        Layout::new(self.outputs, self.inputs, self.grid).unwrap()
    }

    fn packed(&self) -> (Layout, Vec<u8>) {
        let layout = self.layout();
        let mut packed = vec![7; layout.n_bytes()];
        let given = Codes { codes: &self.codes, scales: &self.scales, zeros: self.zeros.as_deref() };
        pack(&layout, given, &mut packed, &on(1, &Cancel::new())).unwrap();
        (layout, packed)
    }

    /// The state of output `n` and input `k`: the last bits of a stream with joined ends.
    fn state(&self, n: usize, k: usize, (bits, rows): (u32, usize)) -> u32 {
        let first = n / rows * rows;
        let count = rows.min(self.outputs - first);
        let row = |before: usize| first + (n - first + count * before - before) % count;
        let newest_last = (0..bits.div_ceil(self.grid.bits) as usize).rev();
        newest_last.fold(0, |state, before| {
            let code = self.codes[row(before) * self.inputs + k];
            (state << self.grid.bits | u32::from(code)) & ((1 << bits) - 1)
        })
    }

    /// Code less zero point, and scale, of output `n` and input `k`.
    fn weight(&self, n: usize, k: usize) -> (i32, f32) {
        let g = if self.grid.group_size == 0 { self.inputs } else { self.grid.group_size };
        let at = n * self.inputs.div_ceil(g) + k / g;
        if let Some(trellis) = self.trellis {
            return ((value(self.state(n, k, trellis)) * 128.0) as i32, self.scales[at] / 128.0);
        }
        if let Values::Table(table) = self.grid.values {
            let level = table.bytes()[usize::from(self.codes[n * self.inputs + k])];
            return (i32::from(level), self.scales[at] / 16.0);
        }
        let zero = self.zeros.as_ref().map_or(1 << (self.grid.bits - 1), |z| z[at]);
        (i32::from(self.codes[n * self.inputs + k]) - i32::from(zero), self.scales[at])
    }

    /// First inputs of the blocks: groups, those above 256 cut into 128.
    fn blocks(&self) -> Vec<usize> {
        let (inputs, g) = (self.inputs, self.grid.group_size);
        let group = if g == 0 { inputs } else { g.min(inputs) };
        let cut = if group > 256 { 128 } else { group };
        let starts = |start: usize| (start..inputs.min(start + group)).step_by(cut);
        (0..inputs).step_by(group).flat_map(starts).chain([inputs]).collect()
    }

    /// The plain twin: `docs/cpu.md` word by word.
    fn twin(&self, x: &[f32], precision: Precision) -> Vec<f32> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let mut out = Vec::new();
        for row in x.chunks(inputs) {
            for n in 0..outputs {
                let mut sum = 0.0_f32;
                for ends in self.blocks().windows(2) {
                    let block = &row[ends[0]..ends[1]];
                    let (scale, integers) = integers(block, precision);
                    let mut value = None;
                    for limb in (0..limbs(precision)).rev() {
                        let dot: i32 = (0..block.len())
                            .map(|i| self.weight(n, ends[0] + i).0 * digit(integers[i], limb))
                            .sum();
                        value = Some(value.map_or(dot as f32, |v: f32| v.mul_add(256.0, dot as f32)));
                    }
                    let scale = self.weight(n, ends[0]).1 * scale;
                    sum = value.unwrap().mul_add(scale, sum);
                }
                out.push(sum);
            }
        }
        out
    }
}

fn limbs(precision: Precision) -> usize {
    1 + PRECISIONS.iter().position(|&p| p == precision).unwrap()
}

/// Signed byte `limb` of a number, lowest first.
fn digit(mut v: i32, limb: usize) -> i32 {
    for _ in 0..limb {
        v = (v - i32::from(v as i8)) >> 8;
    }
    i32::from(v as i8)
}

fn integers(block: &[f32], precision: Precision) -> (f32, Vec<i32>) {
    let largest = block.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let (scale, inverse) = match precision {
        Precision::Int8 if largest < 1e-30 => (0.0, 0.0),
        Precision::Int8 => (largest / 127.0, 127.0 / largest),
        _ => {
            let top = if precision == Precision::Fixed16 { 14 } else { 22 };
            let exponent = (-100..=128).find(|&e| f64::from(largest) < 2.0_f64.powi(e)).unwrap();
            (2.0_f32.powi(exponent - top), 2.0_f32.powi(top - exponent))
        }
    };
    (scale, block.iter().map(|v| (v * inverse).round_ties_even() as i32).collect())
}

fn on(threads: usize, cancel: &Cancel) -> Execution<'_> {
    Execution { threads, cancel }
}

fn product(
    packed: &(Layout, Vec<u8>),
    x: &[f32],
    engine: Engine,
    threads: usize,
    precision: Precision,
) -> Vec<f32> {
    let cancel = Cancel::new();
    let plan = Plan { precision, engine, execution: on(threads, &cancel) };
    let [outputs, inputs] = packed.0.shape();
    let mut out = vec![f32::NAN; x.len() / inputs * outputs];
    multiply(&packed.0, &packed.1, Inputs::F32(x), None, Outputs::F32(&mut out), &plan).unwrap();
    out
}

fn plain(bits: u32, group_size: usize, symmetric: bool, scale_type: ScaleType) -> Grid {
    Grid { bits, group_size, symmetric, signed: false, scale_type, search: Search::Max, values: Values::Even }
}

fn grids() -> impl Strategy<Value = ([usize; 2], Grid)> {
    let formats = prop_oneof![Just(ScaleType::F32), Just(ScaleType::Bf16), Just(ScaleType::F16)];
    let bits = prop_oneof![Just(2_u32), Just(3), Just(4), Just(8)];
    let group = prop_oneof![Just(0_usize), Just(8), Just(32), Just(48), Just(128), Just(300), 1_usize..70];
    (1_usize..70, 1_usize..600, group, bits, any::<bool>(), formats).prop_map(
        |(outputs, inputs, group_size, bits, symmetric, scales)| {
            ([outputs, inputs], plain(bits, group_size, symmetric, scales))
        },
    )
}

/// Layers on a plain grid and, where the bits allow it, on a trellis or with the levels of a table.
fn layers() -> impl Strategy<Value = Layer> {
    let trellis =
        prop_oneof![Just(None), (0_u32..13, prop_oneof![1_usize..6, 20_usize..50, Just(512)]).prop_map(Some)];
    (grids(), trellis, any::<bool>(), any::<u32>()).prop_map(|((shape, grid), trellis, table, seed)| {
        let layer = Layer::random(shape, grid, u64::from(seed));
        match trellis {
            Some((more, rows)) => layer.on_trellis(more, rows),
            None if table => layer.on_table(u64::from(seed)),
            None => layer,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_instruction_set_has_the_bits_of_the_plain_twin(layer in layers(), tokens in prop_oneof![1_usize..10, Just(17), Just(35)], seed: u32) {
        let packed = layer.packed();
        let x = activations(tokens * layer.inputs, u64::from(seed) + 3);
        for precision in PRECISIONS {
            let expected = layer.twin(&x, precision);
            for engine in Engine::available() {
                for threads in [1, 3] {
                    let got = product(&packed, &x, engine, threads, precision);
                    prop_assert_eq!(&got, &expected, "{} {:?} on {}", engine.name(), precision, threads);
                }
            }
        }
    }

    #[test]
    fn codes_come_back(layer in layers()) {
        let (layout, packed) = layer.packed();
        prop_assert_eq!(unpack(&layout, &packed, &on(2, &Cancel::new())).unwrap(), layer.codes);
    }

    #[test]
    fn errors_stay_within_the_stated_bound(layer in layers(), seed: u32) {
        let x = activations(layer.inputs, u64::from(seed) + 3);
        for (precision, step) in [(Precision::Int8, 0.5 / 127.0), (Precision::Fixed16, 2.0_f64.powi(-14)), (Precision::Fixed24, 2.0_f64.powi(-22))] {
            let got = product(&layer.packed(), &x, Engine::best(), 1, precision);
            for n in 0..layer.outputs {
                let (mut exact, mut bound, mut size) = (0.0, 0.0, 0.0);
                for ends in layer.blocks().windows(2) {
                    let block = &x[ends[0]..ends[1]];
                    let largest = f64::from(block.iter().fold(0.0_f32, |a, b| a.max(b.abs())));
                    for (i, &v) in block.iter().enumerate() {
                        let (q, s) = layer.weight(n, ends[0] + i);
                        let w = f64::from(q) * f64::from(s);
                        exact += w * f64::from(v);
                        bound += w.abs() * largest * step;
                        size += w.abs() * largest;
                    }
                }
                // The float32 sum over blocks, and three roundings in each.
                let rounding = size * (layer.blocks().len() + 3) as f64 * 2.0_f64.powi(-24);
                let error = (f64::from(got[n]) - exact).abs();
                prop_assert!(error <= bound + rounding, "{error} > {bound} + {rounding}");
            }
        }
    }
}

fn one_layer(outputs: usize, inputs: usize) -> Layer {
    Layer::random([outputs, inputs], plain(4, 32, true, ScaleType::F16), 5)
}

#[test]
fn a_token_has_the_same_bits_in_any_batch() {
    for layer in [one_layer(40, 100), one_layer(40, 100).on_trellis(6, 512)] {
        let packed = layer.packed();
        let x = activations(133 * 100, 9);
        let together = product(&packed, &x, Engine::best(), 2, Precision::Fixed24);
        for (token, results) in x.chunks(100).zip(together.chunks(40)) {
            assert_eq!(product(&packed, token, Engine::best(), 1, Precision::Fixed24), results);
        }
    }
}

#[test]
fn streams_of_many_panels_have_the_bits_of_the_plain_twin() {
    for bits in [2, 3, 4] {
        let grid = plain(bits, 0, true, ScaleType::Bf16);
        let layer = Layer::random([1100, 77], grid, 5).on_trellis(8, 512);
        let packed = layer.packed();
        for tokens in [1, 13] {
            let x = activations(tokens * 77, 9);
            for precision in PRECISIONS {
                let expected = layer.twin(&x, precision);
                for engine in Engine::available() {
                    for threads in [1, 3] {
                        let got = product(&packed, &x, engine, threads, precision);
                        assert_eq!(got, expected, "{} {precision:?} {bits} bits", engine.name());
                    }
                }
            }
        }
    }
}

#[test]
fn bfloat16_output_is_float32_with_bias_rounded_once() {
    let layer = one_layer(40, 100);
    let (layout, packed) = layer.packed();
    let x = activations(3 * 100, 9);
    let bits: Vec<u16> = x.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
    let bias: Vec<f32> = (0..40).map(|i| i as f32 / 7.0).collect();
    let cancel = Cancel::new();
    let plan = Plan { precision: Precision::Fixed16, engine: Engine::best(), execution: on(2, &cancel) };
    let mut out = vec![0; 3 * 40];
    multiply(&layout, &packed, Inputs::Bf16(&bits), Some(&bias), Outputs::Bf16(&mut out), &plan).unwrap();
    let plain = product(&(layout, packed), &x, Engine::best(), 1, Precision::Fixed16);
    let expected = plain.iter().enumerate().map(|(i, v)| bf16::from_f32(v + bias[i % 40]).to_bits());
    assert_eq!(out, expected.collect::<Vec<_>>());
}

#[test]
fn activations_that_are_not_finite_make_their_own_token_nan() {
    let layer = one_layer(40, 100);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = activations(3 * 100, 9);
        x[137] = bad;
        for precision in PRECISIONS {
            let out = product(&layer.packed(), &x, Engine::best(), 1, precision);
            assert!(out[40..80].iter().all(|v| v.is_nan()));
            assert!(out[..40].iter().chain(&out[80..]).all(|v| v.is_finite()));
        }
    }
}

#[test]
fn sizes_of_activations_do_not_matter_to_the_relative_error() {
    let layer = one_layer(33, 64);
    let x = activations(64, 4);
    let plain = product(&layer.packed(), &x, Engine::best(), 1, Precision::Fixed24);
    for exponent in [-90, 100] {
        let factor = 2.0_f32.powi(exponent);
        let scaled: Vec<f32> = x.iter().map(|v| v * factor).collect();
        let out = product(&layer.packed(), &scaled, Engine::best(), 1, Precision::Fixed24);
        assert!(out.iter().zip(&plain).all(|(a, b)| *a == b * factor));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let layer = one_layer(40, 100);
    let (layout, packed) = layer.packed();
    let cancel = Cancel::new();
    let plan = Plan { precision: Precision::Fixed24, engine: Engine::best(), execution: on(1, &cancel) };
    let run = |packed: &[u8], x: &[f32], bias: Option<&[f32]>, out: &mut [f32]| {
        multiply(&layout, packed, Inputs::F32(x), bias, Outputs::F32(out), &plan).unwrap_err().to_string()
    };
    let (x, mut out) = (vec![0.0; 100], vec![0.0; 40]);
    assert!(run(&packed[1..], &x, None, &mut out).starts_with("the packed weight: expected 2 x "));
    assert!(
        run(&packed, &x[1..], None, &mut out).starts_with("activations: expected a multiple of 100 values")
    );
    assert!(run(&packed, &x, None, &mut out[1..]).starts_with("results: expected 1 x 40"));
    assert!(run(&packed, &x, Some(&[0.0; 39]), &mut out).starts_with("the bias: expected 1 x 40"));

    let given = Codes { codes: &layer.codes, scales: &layer.scales, zeros: None };
    let refuse = |given: Codes<'_>| pack(&layout, given, &mut packed.clone(), &on(1, &cancel)).unwrap_err();
    assert!(matches!(
        refuse(Codes { codes: &layer.codes[1..], ..given }),
        Error::Shape { what: "codes", .. }
    ));
    assert!(matches!(refuse(Codes { scales: &[], ..given }), Error::Shape { what: "scales", .. }));
    let with = |scale: f32| {
        let mut scales = layer.scales.clone();
        scales[1] = scale;
        refuse(Codes { scales: &scales, ..given })
    };
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(matches!(with(bad), Error::NonFiniteMatrix { what: "scales", row: 0, column: 1, .. }));
    }
    let large = with(1e9);
    assert!(matches!(large, Error::ScaleRange { row: 0, group: 1, dtype: "float16", .. }));
    assert!(matches!(refuse(Codes { zeros: Some(&[]), ..given }), Error::Shape { what: "zero points", .. }));
    let mut wrong = layer.codes.clone();
    wrong[203] = 16;
    let refused = refuse(Codes { codes: &wrong, ..given });
    assert!(matches!(refused, Error::CodeRange { row: 2, column: 3, value: 16, .. }));

    let grid = layer.grid;
    let values = Values::Trellis(Trellis::new(4, 10, 9).unwrap());
    for wrong in [Grid { bits: 3, values, ..grid }, Grid { symmetric: false, values, ..grid }] {
        let refused = Layout::new(40, 100, wrong).unwrap_err();
        assert!(matches!(refused, Error::Setting { name: "a grid of codes on a trellis", .. }));
    }
    assert!(matches!(Trellis::new(4, 10, 0).unwrap_err(), Error::Setting { name: "stream_rows", .. }));
    assert!(matches!(
        Layout::new(40, 100, Grid { bits: 5, ..grid }).unwrap_err(),
        Error::Setting { name: "bits", .. }
    ));
    assert!(matches!(Layout::new(40, 0, grid).unwrap_err(), Error::Shape { .. }));
    assert!(matches!(Layout::new(40, usize::MAX / 64, grid).unwrap_err(), Error::TooLarge { .. }));
}
