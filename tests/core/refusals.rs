//! Every way to be refused, and that a refusal changes nothing.
#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use loopq_core::coordinate::{coordinate, coupled, Settings as Coordinate};
use loopq_core::dump::{RowType, Rows};
use loopq_core::error::Kind;
use loopq_core::factor::{DampedFactor, DampedHessian, Order, Symmetric};
use loopq_core::gptq::{gptq, Options, Scales};
use loopq_core::grid::{rtn, to_biased, Grid, ScaleType, Search, Trellis, Values};
use loopq_core::hessian::{Accumulator, Settings};
use loopq_core::pack::{dense, marlin, w4};
use loopq_core::simd::Isa;
use loopq_core::{Cancel, Error, Execution, Weight};

static CANCEL: LazyLock<Cancel> = LazyLock::new(Cancel::new);

/// One thread, never cancelled.
fn alone() -> Execution<'static> {
    Execution { threads: 1, cancel: &CANCEL }
}

fn weight(values: &[f32], rows: usize) -> Weight<'_> {
    Weight::new("W", values, rows, values.len() / rows).unwrap()
}

fn accumulator(dim: usize, steps: &[usize], per_step: bool) -> Accumulator {
    Accumulator::new(Settings { dim, steps: steps.to_vec(), per_step, threads: 1, isa: Isa::best() }).unwrap()
}

fn grid(bits: u32) -> Grid {
    let (scale_type, search) = (ScaleType::F32, Search::Max);
    Grid { bits, group_size: 0, symmetric: true, signed: false, scale_type, search, values: Values::Even }
}

/// Asserts the variant, the class, and that the message holds all of `parts`.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: Kind, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn rows_that_are_not_finite_or_too_large() {
    let mut a = accumulator(3, &[0, 5], true);
    let good = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    a.update(5, Rows::from_f32(&good, 2, 3).unwrap(), &CANCEL).unwrap();
    for (bad, kind, name) in [
        (f32::NAN, Kind::NonFinite, "NaN"),
        (f32::NEG_INFINITY, Kind::NonFinite, "-inf"),
        (1e9, Kind::Solve, "1e9"),
    ] {
        let mut rows = good;
        rows[4] = bad;
        let got = a.update(5, Rows::from_f32(&rows, 2, 3).unwrap(), &CANCEL);
        refused(got, kind, &[name, "step 5", "row 3", "column 1"]);
    }
    let bits = [0_u16, 0, 0x7f80];
    let mut b = accumulator(3, &[0], true);
    let got = b.update(0, Rows::from_bits16(&bits, RowType::Bf16, 1, 3).unwrap(), &CANCEL);
    refused(got, Kind::NonFinite, &["inf", "column 2"]);
    a.finish(&CANCEL).unwrap();
    assert_eq!(a.n_rows(5).unwrap(), 2);
    assert!((a.matrix(Some(&[5]), &CANCEL).unwrap()[0] - 17.0).abs() < f64::EPSILON);
}

#[test]
fn sums_beyond_the_grid() {
    let mut a = accumulator(1, &[0], true);
    let rows = vec![1.28e8_f32; 512];
    let mut result = Ok(());
    for _ in 0..3 {
        result = a.update(0, Rows::from_f32(&rows, 512, 1).unwrap(), &CANCEL);
    }
    refused(result, Kind::Solve, &["range", "1024 rows"]);
}

#[test]
fn rows_that_wait_count_towards_the_range() {
    // 8192 rows wait at most; the rest of the call that fills them waits in turn, and no sum holds it yet.
    let each = 2_f32.powi(25);
    let rows = vec![each; 8192];
    let mut a = accumulator(1, &[0], true);
    a.update(0, Rows::from_f32(&rows[..100], 100, 1).unwrap(), &CANCEL).unwrap();
    a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &CANCEL).unwrap();
    let more = a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &CANCEL);
    refused(more, Kind::Solve, &["range", "8292 rows"]);
}

#[test]
fn a_bound_is_not_an_end() {
    // One loud row in each call: by rows and largest magnitude alone the range would be passed; the sum is far from it.
    let mut rows = vec![1.0_f32; 8192];
    rows[17] = 2_f32.powi(24);
    let mut a = accumulator(1, &[0], true);
    for _ in 0..20 {
        a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &CANCEL).unwrap();
    }
    let loudest = vec![2_f32.powi(27); 256];
    let mut b = accumulator(1, &[0], true);
    for _ in 0..4 {
        b.update(0, Rows::from_f32(&loudest, 256, 1).unwrap(), &CANCEL).unwrap();
    }
    let more = b.update(0, Rows::from_f32(&loudest, 256, 1).unwrap(), &CANCEL);
    refused(more, Kind::Solve, &["range"]);
}

#[test]
fn settings_of_an_accumulator() {
    let make = |dim, steps: &[usize]| {
        Accumulator::new(Settings {
            dim,
            steps: steps.to_vec(),
            per_step: true,
            threads: 1,
            isa: Isa::best(),
        })
    };
    refused(make(0, &[0]), Kind::Config, &["dim = 0"]);
    refused(make(2, &[]), Kind::Config, &["steps"]);
    refused(make(2, &[1, 1]), Kind::Config, &["ascending"]);
    let crowd = Execution { threads: 5000, cancel: &CANCEL };
    refused(rtn(weight(&[1.0], 1), &grid(4), &crowd), Kind::Config, &["threads = 5000", "1024"]);
    // A width that no memory has: an error with the size, not the end of the process.
    refused(make(1 << 24, &[0]), Kind::Memory, &["exact sums of a Hessian", "GiB", "--memory"]);
    refused(make(1 << 40, &[0]), Kind::Config, &["overflows"]);
}

#[test]
fn order_of_calls_and_kinds_of_rows() {
    let mut a = accumulator(2, &[0, 1], false);
    let rows = Rows::from_f32(&[1.0, 2.0], 1, 2).unwrap();
    refused(a.update(7, rows, &CANCEL), Kind::Config, &["step 7", "[0, 1]"]);
    refused(
        a.update(0, Rows::from_f32(&[1.0], 1, 1).unwrap(), &CANCEL),
        Kind::Config,
        &["expected 2, got 1"],
    );
    a.update(0, rows, &CANCEL).unwrap();
    let brain = Rows::from_bits16(&[1, 2], RowType::Bf16, 1, 2).unwrap();
    refused(a.update(0, brain, &CANCEL), Kind::Config, &["BF16", "F32"]);
    refused(a.matrix(None, &CANCEL), Kind::Config, &["finish()"]);
    a.finish(&CANCEL).unwrap();
    refused(a.update(0, rows, &CANCEL), Kind::Config, &["finished"]);
    refused(a.matrix(Some(&[1]), &CANCEL), Kind::Config, &["per_step=True"]);
    refused(a.weighted(None, &[1.0, 1.0], &CANCEL), Kind::Config, &["per_step=True"]);
    refused(Rows::from_f32(&[1.0], 2, 2), Kind::Config, &["16", "4"]);
    let mut other = accumulator(3, &[0, 1], false);
    other.finish(&CANCEL).unwrap();
    refused(a.merge(&other, &CANCEL), Kind::Config, &["dims differ (2 and 3)"]);
}

#[test]
fn interrupted_work() {
    let cancel = Cancel::new();
    cancel.cancel();
    let stopped = Execution { threads: 1, cancel: &cancel };
    let mut a = accumulator(2, &[0], true);
    let rows = vec![1.0_f32; 2 * 20_000];
    refused(
        a.update(0, Rows::from_f32(&rows, 20_000, 2).unwrap(), &cancel),
        Kind::Interrupted,
        &["interrupted"],
    );
    refused(a.finish(&CANCEL), Kind::Config, &["half-way", "new accumulator"]);
    let values = [1.0, 0.0, 0.0, 1.0];
    let h = Symmetric::f64(&values, 2).unwrap();
    let make = |execution| DampedFactor::<f64>::new(h, &[0.1; 2], Order::Conditional, execution);
    refused(make(&stopped), Kind::Interrupted, &[]);
    let factor = make(&alone()).unwrap();
    let (w, input) = (weight(&[1.0, 2.0], 1), DampedHessian::new(h, &factor).unwrap());
    let gptq_options = Options { scales: Scales::Static, block_size: 1, beam: 1, isa: Isa::best() };
    refused(gptq(w, &factor, &grid(4), &gptq_options, &stopped), Kind::Interrupted, &[]);
    let settings = Coordinate { grid: grid(4), beam: 1, sweeps: 1, rounds: 1, refit: true };
    refused(coordinate(w, &input, &settings, &stopped), Kind::Interrupted, &[]);
    let two = weight(&[1.0, 2.0, 3.0, 4.0], 2);
    refused(coupled(two, &input, &[input], &settings, 1, &stopped), Kind::Interrupted, &[]);
}

#[test]
fn saved_states() {
    let mut a = accumulator(2, &[0], true);
    a.finish(&CANCEL).unwrap();
    let good = a.state(&CANCEL).unwrap();
    let refuse = |change: &dyn Fn(&mut loopq_core::hessian::State), part: &str| {
        let mut state = good.clone();
        change(&mut state);
        refused(Accumulator::from_state(&state, 1, &CANCEL), Kind::Dump, &[part]);
    };
    refuse(&|s| s.spec_version = 9, "version 9");
    refuse(&|s| s.matrices.clear(), "0");
    refuse(&|s| s.matrices[0].lo.to_mut()[1] = -1, "low limb 1");
    refuse(&|s| s.matrices[0].hi.to_mut().truncate(1), "3 entries");
    refuse(&|s| s.matrices[0].hi.to_mut()[2] = i64::MIN, "high limb 2");
    refuse(&|s| s.steps = vec![], "found");
    refuse(&|s| s.steps = vec![1, 1], "row counts");
    refuse(&|s| s.dim = 0, "dim");
    // A width that no memory has is refused before memory is asked for.
    refuse(&|s| s.dim = 1 << 31, "entries needed");
}

/// Adds rows of a file that nobody else knows of.
#[allow(unsafe_code)] // the file is mapped
fn add(to: &mut Accumulator, path: &std::path::Path, tensor: &str) -> Result<(), Error> {
    // SAFETY: this test alone writes the file, and not during the call.
    unsafe { to.update_file(0, path, tensor, &CANCEL) }
}

#[test]
fn files() {
    let mut a = accumulator(2, &[0], true);
    let gone = std::path::Path::new("/nowhere/rows.safetensors");
    refused(add(&mut a, gone, "x"), Kind::Dump, &["/nowhere/rows.safetensors"]);
    let path = std::env::temp_dir().join(format!("loopq-refusals-{}.safetensors", std::process::id()));
    let file = |values: &[f32], dtype: &str| {
        let (n, size) = (values.len() / 2, 4 * values.len());
        let header =
            format!("{{\"x\":{{\"dtype\":\"{dtype}\",\"shape\":[{n},2],\"data_offsets\":[0,{size}]}}}}");
        let data = values.iter().flat_map(|v| v.to_le_bytes());
        (header.len() as u64).to_le_bytes().into_iter().chain(header.into_bytes()).chain(data).collect()
    };
    let good: Vec<u8> = file(&[1.0, 2.0, 3.0, 4.0], "F32");
    let name = path.to_string_lossy().into_owned();
    for (bytes, tensor, kind, parts) in [
        (vec![], "x", Kind::Dump, ["not a whole safetensors file", "collect"]),
        (good[..good.len() - 1].to_vec(), "x", Kind::Dump, ["not a whole safetensors file", "collect"]),
        ([&good[..], &[0]].concat(), "x", Kind::Dump, ["not a whole safetensors file", "collect"]),
        (good.clone(), "y", Kind::Dump, ["no tensor \"y\"", "index"]),
        (file(&[1.0, 2.0], "I32"), "x", Kind::Dump, ["tensor \"x\" is I32", "rows must be BF16"]),
        (file(&[1.0, f32::NAN], "F32"), "x", Kind::NonFinite, ["tensor \"x\": input rows hold NaN", "row 0"]),
    ] {
        std::fs::write(&path, bytes).unwrap();
        refused(add(&mut a, &path, tensor), kind, &[&name, parts[0], parts[1]]);
    }
    refused(add(&mut accumulator(3, &[0], true), &path, "x"), Kind::Dump, &["shape [1, 2]", "[rows, 3]"]);
    std::fs::write(&path, &good).unwrap();
    add(&mut a, &path, "x").unwrap();
    std::fs::remove_file(&path).unwrap();
    a.finish(&CANCEL).unwrap();
    let h = a.matrix(None, &CANCEL).unwrap();
    assert_eq!(h, vec![10.0, 14.0, 14.0, 20.0]);
}

#[test]
fn hessians_that_cannot_be_factored() {
    let make = |h: &[f64], mu: &[f64]| {
        DampedFactor::<f64>::new(Symmetric::f64(h, 2)?, mu, Order::Diagonal, &alone())
    };
    refused(make(&[0.0; 4], &[0.0; 2]), Kind::Solve, &["all zeros"]);
    refused(
        make(&[1.0, 0.0, 0.0, -1.0], &[0.1; 2]),
        Kind::Solve,
        &["column 1 of 2", "damping 1e-1 on a diagonal entry of -1e0", "raise the damping"],
    );
    refused(
        make(&[1.0, f64::NAN, 0.0, 1.0], &[0.1; 2]),
        Kind::NonFinite,
        &["H holds NaN", "row 0, column 1"],
    );
    let factor = make(&[1.0, 0.0, 0.0, 1.0], &[0.1; 2]).unwrap();
    let shift = |c: &[f64], alpha| factor.shift(weight(&[1.0, 2.0], 1), c, alpha, &alone());
    refused(shift(&[1.0, 0.0, f64::NAN, 1.0], 1.0), Kind::NonFinite, &["C holds NaN", "row 1, column 0"]);
    refused(shift(&[1.0; 3], 1.0), Kind::Config, &["C: expected"]);
    refused(shift(&[1.0; 4], f64::NAN), Kind::Config, &["alpha = NaN"]);
    refused(make(&[1.0, 0.0, 0.0, 1.0], &[0.1, -1.0]), Kind::Config, &["mu = -1"]);
    refused(make(&[1.0, 0.0, 0.0, 1.0], &[0.1]), Kind::Config, &["mu: expected 2, got 1"]);
    refused(make(&[1.0; 3], &[0.1; 2]), Kind::Config, &["2 x 2"]);
    refused(Order::parse("x"), Kind::Config, &["'natural', 'diagonal', 'conditional'"]);
}

#[test]
fn weights_scales_and_settings_of_a_solve() {
    refused(rtn(weight(&[1.0], 1), &grid(5), &alone()), Kind::Config, &["bits = 5", "2, 3, 4, 8"]);
    refused(Weight::new("W", &[1.0, f32::NAN], 2, 1), Kind::NonFinite, &["W holds NaN", "row 1"]);
    refused(Weight::new("W", &[], 2, 0), Kind::Config, &["1 or more columns"]);
    refused(Weight::new("W", &[], usize::MAX, 2), Kind::Config, &["overflows"]);
    let half = Grid { scale_type: ScaleType::F16, ..grid(4) };
    for search in [Search::Max, Search::HalfRange, Search::Mse] {
        let half = Grid { search, ..half };
        let parts = &["row 1", "infinite", "bfloat16"];
        refused(rtn(weight(&[1.0, 1e9], 2), &half, &alone()), Kind::Solve, parts);
        // Too near to zero for a scale: zeros.
        assert_eq!(rtn(weight(&[1e-20], 1), &half, &alone()).unwrap().codes, [8]);
    }
    let values = [1.0, 0.0, 0.0, 2.0];
    let h = Symmetric::f64(&values, 2).unwrap();
    let ordered = DampedFactor::<f64>::new(h, &[0.1; 2], Order::Diagonal, &alone()).unwrap();
    assert_eq!(ordered.order(), [1, 0]);
    let solve = |w: &[f32], scales, block_size, beam| {
        let options = Options { scales, block_size, beam, isa: Isa::best() };
        gptq(weight(w, 1), &ordered, &grid(4), &options, &alone())
    };
    // The row is named by its number in W, whichever vector it is solved in.
    let factor = DampedFactor::<f64>::new(h, &[0.1; 2], Order::Natural, &alone()).unwrap();
    let mut rows = vec![1.0; 2 * 40];
    rows[2 * 37 + 1] = 1e9;
    let options = Options { scales: Scales::Group, block_size: 128, beam: 1, isa: Isa::best() };
    let half = Grid { scale_type: ScaleType::F16, ..grid(4) };
    let found = gptq(weight(&rows, 40), &factor, &half, &options, &alone());
    refused(found, Kind::Solve, &["row 37", "infinite"]);
    let pair = [1.0, 2.0];
    refused(solve(&pair, Scales::Group, 128, 1), Kind::Config, &["'static' where columns are reordered"]);
    refused(solve(&pair, Scales::Static, 0, 1), Kind::Config, &["block_size = 0"]);
    refused(solve(&pair, Scales::Static, 128, 0), Kind::Config, &["beam = 0"]);
    refused(solve(&pair, Scales::Group, 128, 2), Kind::Config, &["'static' with more than one path"]);
    refused(solve(&[1.0], Scales::Static, 128, 1), Kind::Config, &["columns of W: expected 2"]);
    refused(Scales::parse("x"), Kind::Config, &["'group', 'static'"]);
    refused(Search::parse("x"), Kind::Config, &["'max', 'half-range', 'mse'"]);
    refused(ScaleType::parse("x", Some(3), 0), Kind::Config, &["'bfloat16'"]);
    for (name, wrong) in [("bfloat16", 9), ("bfloat16", 0), ("float16", 12), ("float32", 25)] {
        refused(ScaleType::parse(name, Some(wrong), 0), Kind::Config, &["scale_bits", name]);
    }
    let on_trellis = Grid { values: Values::Trellis(Trellis::new(4, 10, 8).unwrap()), ..grid(4) };
    refused(rtn(weight(&[1.0], 1), &on_trellis, &alone()), Kind::Config, &["codes of a plain grid"]);
    refused(grid(4).on_trellis(), Kind::Config, &["codes on a trellis"]);
}

#[test]
fn codes_and_shapes_of_a_packing() {
    refused(dense::pack(&[9], 1, 1, 3), Kind::Config, &["code 9", "3 bits"]);
    refused(dense::pack(&[0], 1, 1, 5), Kind::Config, &["bits = 5"]);
    refused(dense::unpack(&[0], 1, 33, 4), Kind::Config, &["packed codes"]);
    refused(to_biased(&[0, -9], 2, 4, 8), Kind::Config, &["code -9", "column 1"]);
    refused(to_biased(&[7, 0, 8], 2, 4, 8), Kind::Config, &["code 8", "row 1, column 0"]);
    refused(marlin::pack(&[0; 24], 24, 1), Kind::Config, &["multiple of 16"]);
    refused(marlin::pack(&[0; 16], 16, 1), Kind::Config, &["multiple of 64"]);
    refused(marlin::unpack(&[], 1 << 63, 1 << 63), Kind::Config, &["packed codes"]);
    refused(w4::pack(&[0; 24], 1, 24, &alone()), Kind::Config, &["outputs (N) = 1", "multiple of 16"]);
    refused(w4::pack(&[0; 16], 16, 1, &alone()), Kind::Config, &["inputs (K) = 1", "multiple of 32"]);
    refused(w4::pack(&[0; 16 * 32 - 1], 16, 32, &alone()), Kind::Config, &["codes", "511 values"]);
    let mut codes = vec![8; 32 * 32];
    codes[20 * 32 + 3] = 16;
    refused(w4::pack(&codes, 32, 32, &alone()), Kind::Config, &["code 16", "row 20, column 3"]);
    refused(w4::unpack(&[0; 127], 16, 32, &alone()), Kind::Config, &["packed codes", "127 values"]);
    refused(w4::unpack(&[0; 128], 16, 32, &alone()), Kind::Config, &["codes beyond it"]);
}
