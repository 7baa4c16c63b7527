//! Every way to be refused, and that a refusal changes nothing.
#![allow(clippy::unwrap_used)]

use loopq_core::dump::{RowType, Rows};
use loopq_core::error::Kind;
use loopq_core::factor::{Factor, Symmetric};
use loopq_core::grid::{to_biased, Grid, ScaleType, Search};
use loopq_core::hessian::{Accumulator, Settings};
use loopq_core::pack::{dense, marlin, w4};
use loopq_core::simd::Isa;
use loopq_core::solve::{gptq, rtn, Run, Scales};
use loopq_core::{dims, pool, Error, Watch};

fn accumulator(dim: usize, steps: &[usize], per_step: bool) -> Accumulator {
    Accumulator::new(Settings { dim, steps: steps.to_vec(), per_step, threads: 1, isa: Isa::best() }).unwrap()
}

fn grid(bits: u32) -> Grid {
    Grid { bits, group_size: 0, symmetric: true, scale_type: ScaleType::F32, search: Search::Max }
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
    a.update(5, Rows::from_f32(&good, 2, 3).unwrap(), &Watch::new()).unwrap();
    for (bad, kind, name) in [
        (f32::NAN, Kind::NonFinite, "NaN"),
        (f32::NEG_INFINITY, Kind::NonFinite, "-inf"),
        (1e9, Kind::Solve, "1e9"),
    ] {
        let mut rows = good;
        rows[4] = bad;
        let got = a.update(5, Rows::from_f32(&rows, 2, 3).unwrap(), &Watch::new());
        refused(got, kind, &[name, "step 5", "row 3", "column 1"]);
    }
    let bits = [0_u16, 0, 0x7f80];
    let mut b = accumulator(3, &[0], true);
    let got = b.update(0, Rows::from_bits16(&bits, RowType::Bf16, 1, 3).unwrap(), &Watch::new());
    refused(got, Kind::NonFinite, &["inf", "column 2"]);
    a.finish(&Watch::new()).unwrap();
    assert_eq!(a.n_rows(5).unwrap(), 2);
    assert!((a.matrix(Some(&[5])).unwrap()[0] - 17.0).abs() < f64::EPSILON);
}

#[test]
fn sums_beyond_the_grid() {
    let mut a = accumulator(1, &[0], true);
    let rows = vec![1.28e8_f32; 512];
    let mut result = Ok(());
    for _ in 0..3 {
        result = a.update(0, Rows::from_f32(&rows, 512, 1).unwrap(), &Watch::new());
    }
    refused(result, Kind::Solve, &["range", "1024 rows"]);
}

#[test]
fn rows_that_wait_count_towards_the_range() {
    // 8192 rows wait at most; the rest of the call that fills them waits in turn, and no sum holds it yet.
    let each = 2_f32.powi(25);
    let rows = vec![each; 8192];
    let mut a = accumulator(1, &[0], true);
    a.update(0, Rows::from_f32(&rows[..100], 100, 1).unwrap(), &Watch::new()).unwrap();
    a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &Watch::new()).unwrap();
    let more = a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &Watch::new());
    refused(more, Kind::Solve, &["range", "8292 rows"]);
}

#[test]
fn a_bound_is_not_an_end() {
    // One loud row in each call: by rows and largest magnitude alone the range would be passed; the sum is far from it.
    let mut rows = vec![1.0_f32; 8192];
    rows[17] = 2_f32.powi(24);
    let mut a = accumulator(1, &[0], true);
    for _ in 0..20 {
        a.update(0, Rows::from_f32(&rows, 8192, 1).unwrap(), &Watch::new()).unwrap();
    }
    let one = [2_f64.powi(62)];
    let mut b = accumulator(1, &[0], true);
    for _ in 0..4 {
        b.add_products(&[(0, 1)], &one).unwrap();
    }
    refused(b.add_products(&[(0, 1)], &one), Kind::Solve, &["range"]);
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
    refused(pool::pool(5000), Kind::Config, &["threads = 5000", "1024"]);
}

#[test]
fn order_of_calls_and_kinds_of_rows() {
    let mut a = accumulator(2, &[0, 1], false);
    let rows = Rows::from_f32(&[1.0, 2.0], 1, 2).unwrap();
    refused(a.update(7, rows, &Watch::new()), Kind::Config, &["step 7", "[0, 1]"]);
    refused(
        a.update(0, Rows::from_f32(&[1.0], 1, 1).unwrap(), &Watch::new()),
        Kind::Config,
        &["expected 2, got 1"],
    );
    a.update(0, rows, &Watch::new()).unwrap();
    let brain = Rows::from_bits16(&[1, 2], RowType::Bf16, 1, 2).unwrap();
    refused(a.update(0, brain, &Watch::new()), Kind::Config, &["BF16", "F32"]);
    refused(a.matrix(None), Kind::Config, &["finish()"]);
    a.finish(&Watch::new()).unwrap();
    refused(a.update(0, rows, &Watch::new()), Kind::Config, &["finished"]);
    refused(a.matrix(Some(&[1])), Kind::Config, &["per_step=True"]);
    refused(a.weighted(None, &[1.0, 1.0]), Kind::Config, &["per_step=True"]);
    refused(Rows::from_f32(&[1.0], 2, 2), Kind::Config, &["16", "4"]);
    refused(RowType::parse("I8"), Kind::Config, &["BF16"]);
    let mut other = accumulator(3, &[0, 1], false);
    other.finish(&Watch::new()).unwrap();
    refused(a.merge(&other), Kind::Config, &["dims differ (2 and 3)"]);
}

#[test]
fn interrupted_work() {
    let watch = Watch::new();
    watch.cancel();
    let mut a = accumulator(2, &[0], true);
    let rows = vec![1.0_f32; 2 * 20_000];
    refused(
        a.update(0, Rows::from_f32(&rows, 20_000, 2).unwrap(), &watch),
        Kind::Interrupted,
        &["interrupted"],
    );
    refused(a.finish(&Watch::new()), Kind::Config, &["half-way", "new accumulator"]);
    let h = [1.0, 0.0, 0.0, 1.0];
    refused(Factor::<f64>::new(Symmetric::F64(&h), 2, 0.1, false, 1, &watch), Kind::Interrupted, &[]);
}

#[test]
fn saved_states() {
    let mut a = accumulator(2, &[0], true);
    a.finish(&Watch::new()).unwrap();
    let good = a.state().unwrap();
    let refuse = |change: &dyn Fn(&mut loopq_core::hessian::State), part: &str| {
        let mut state = good.clone();
        change(&mut state);
        refused(Accumulator::from_state(&state, 1), Kind::Dump, &[part]);
    };
    refuse(&|s| s.spec_version = 9, "version 9");
    refuse(&|s| s.matrices.clear(), "0");
    refuse(&|s| s.matrices[0].lo[1] = -1, "low limb 1");
    refuse(&|s| s.matrices[0].hi.truncate(1), "3 entries");
    refuse(&|s| s.matrices[0].hi[2] = i64::MIN, "high limb 2");
    refuse(&|s| s.steps = vec![], "found");
    refuse(&|s| s.steps = vec![1, 1], "row counts");
    refuse(&|s| s.dim = 0, "dim");
    // A width that no memory has is refused before memory is asked for.
    refuse(&|s| s.dim = 1 << 31, "entries needed");
}

#[test]
fn files() {
    let mut a = accumulator(2, &[0], true);
    let gone = std::path::Path::new("/nowhere/rows.bin");
    refused(a.update_file(0, gone, 0, 1, RowType::F32, &Watch::new()), Kind::Dump, &["/nowhere/rows.bin"]);
    let path = std::env::temp_dir().join(format!("loopq-refusals-{}.bin", std::process::id()));
    let values: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    std::fs::write(&path, [&[0_u8; 3][..], &values].concat()).unwrap();
    let got = a.update_file(0, &path, 3, 3, RowType::F32, &Watch::new());
    refused(got, Kind::Dump, &["truncated", "3..27", "19"]);
    let got = a.update_file(0, &path, u64::MAX, 1, RowType::F32, &Watch::new());
    refused(got, Kind::Dump, &["truncated"]);
    a.update_file(0, &path, 3, 2, RowType::F32, &Watch::new()).unwrap();
    std::fs::remove_file(&path).unwrap();
    a.finish(&Watch::new()).unwrap();
    let h = a.matrix(None).unwrap();
    assert_eq!(h, vec![10.0, 14.0, 14.0, 20.0]);
}

#[test]
fn hessians_that_cannot_be_factored() {
    let make =
        |h: &[f64], damping| Factor::<f64>::new(Symmetric::F64(h), 2, damping, false, 1, &Watch::new());
    refused(make(&[0.0; 4], 0.1), Kind::Solve, &["all zeros"]);
    refused(make(&[1.0, 0.0, 0.0, -1.0], 0.1), Kind::Solve, &["column 1 of 2", "raise the damping"]);
    refused(make(&[1.0, f64::NAN, 0.0, 1.0], 0.1), Kind::NonFinite, &["H holds NaN", "row 0, column 1"]);
    refused(make(&[1.0, 0.0, 0.0, 1.0], -1.0), Kind::Config, &["damping"]);
    refused(make(&[1.0; 3], 0.1), Kind::Config, &["2 x 2"]);
}

#[test]
fn weights_scales_and_settings_of_a_solve() {
    let watch = Watch::new();
    refused(rtn(&[1.0], 1, 1, &grid(5), None, 1, &watch), Kind::Config, &["bits = 5", "2, 3, 4, 8"]);
    refused(
        rtn(&[1.0, f32::NAN], 2, 1, &grid(4), None, 1, &watch),
        Kind::NonFinite,
        &["W holds NaN", "row 1"],
    );
    refused(rtn(&[1.0], 1, 1, &grid(4), Some(&[1.0, 2.0]), 1, &watch), Kind::Config, &["weights_diag"]);
    let half = Grid { scale_type: ScaleType::F16, ..grid(4) };
    refused(rtn(&[1.0, 1e9], 2, 1, &half, None, 1, &watch), Kind::Solve, &["row 1", "infinite", "bfloat16"]);
    refused(rtn(&[1e-20], 1, 1, &half, None, 1, &watch), Kind::Solve, &["zero"]);
    let h = [1.0, 0.0, 0.0, 2.0];
    let ordered = Factor::<f64>::new(Symmetric::F64(&h), 2, 0.1, true, 1, &watch).unwrap();
    assert_eq!(ordered.order(), [1, 0]);
    let run = |block_size| Run { block_size, threads: 1, isa: Isa::best(), watch: &watch };
    let got = gptq(&[1.0, 2.0], 1, &ordered, &grid(4), Scales::Group, &run(128));
    refused(got, Kind::Config, &["'static' with act_order"]);
    let got = gptq(&[1.0, 2.0], 1, &ordered, &grid(4), Scales::Static, &run(0));
    refused(got, Kind::Config, &["block_size = 0"]);
    refused(Scales::parse("x"), Kind::Config, &["'group', 'static'"]);
    refused(Search::parse("x"), Kind::Config, &["'max', 'mse'"]);
    refused(ScaleType::parse("x"), Kind::Config, &["'bfloat16'"]);
    for wrong in ["bfloat16:9", "bfloat16:0", "float16:12", "float32:25", "bfloat16:", "x:3", "bfloat16:-1"] {
        refused(ScaleType::parse(wrong), Kind::Config, &["'bfloat16:5'"]);
    }
}

#[test]
fn codes_and_shapes_of_a_packing() {
    refused(dense::pack(&[9], 1, 1, 3), Kind::Config, &["code 9", "3 bits"]);
    refused(dense::pack(&[0], 1, 1, 5), Kind::Config, &["bits = 5"]);
    refused(dense::unpack(&[0], 1, 33, 4), Kind::Config, &["packed codes"]);
    refused(to_biased(&[0, -9], 2, 4, 8), Kind::Config, &["code -9", "column 1"]);
    refused(marlin::pack(&[0; 24], 24, 1), Kind::Config, &["multiple of 16"]);
    refused(marlin::pack(&[0; 16], 16, 1), Kind::Config, &["multiple of 64"]);
    refused(w4::pack(&[0; 24], 1, 24, 1), Kind::Config, &["outputs (N) = 1", "multiple of 16"]);
    refused(w4::pack(&[0; 16], 16, 1, 1), Kind::Config, &["inputs (K) = 1", "multiple of 32"]);
    refused(w4::pack(&[0; 16 * 32 - 1], 16, 32, 1), Kind::Config, &["codes", "511 values"]);
    let mut codes = vec![8; 32 * 32];
    codes[20 * 32 + 3] = 16;
    refused(w4::pack(&codes, 32, 32, 1), Kind::Config, &["code 16", "row 20, column 3"]);
    refused(w4::unpack(&[0; 127], 16, 32, 1), Kind::Config, &["packed codes", "127 values"]);
    refused(w4::unpack(&[0; 128], 16, 32, 1), Kind::Config, &["codes beyond it"]);
    refused(w4::from_marlin(&[0; 384], (64, 48), (64, 64), 1), Kind::Config, &["at least 64 inputs"]);
    refused(
        w4::from_marlin(&[0; 384], (64, 48), (64, 32), 1),
        Kind::Config,
        &["zero beyond 32 inputs", "rows 32..48"],
    );
    refused(w4::from_marlin(&[0; 383], (64, 48), (64, 32), 1), Kind::Config, &["Marlin words", "383 values"]);
    refused(w4::from_marlin(&[0; 384], (48, 64), (48, 64), 1), Kind::Config, &["whole tiles"]);
    refused(dims::product("x", usize::MAX, 2), Kind::Config, &["overflows"]);
}
