// Computes the calls of tests/stored_cases.bin with the kernels and compares them with the results
// that are stored beside them: for builds that no Python here could load.
//
//   stored_cases tests/stored_cases.bin     a line for each case; ends with 1 where one is wrong
//
// tests/stored_cases.py writes the file: from the reference, in float64, with a bound for each
// number. tests/test_stored_cases.py builds and runs this, scripts/compilers as well.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../kernels/dispatch.h"
#include "../kernels/threads.h"
#include "stored_cases.h"

using namespace regard;

namespace {

// Numbers of one type that a kernel writes.
struct Buffer {
  Type type;
  std::vector<char> bytes;

  Buffer(Type t, int64_t n) : type(t), bytes(size_t(n * bytes_of(t))) {}
  char* data() { return bytes.data(); }
  int64_t size() const { return int64_t(bytes.size()) / bytes_of(type); }
  double operator[](int64_t i) const { return number_at(bytes.data() + i * bytes_of(type), type); }
};

// The case that is computed, and what was wrong with it.
class Checker {
 public:
  Checker(const Case& c, int threads)
      : case_(c),
        threads_(threads),
        whole_(c, true),
        scores_(c, false),
        p_(whole_.problem),
        real_(p_.type == Type::float64 ? Type::float64 : Type::float32),
        maximum_(real_, rows()),
        total_(real_, rows()),
        out_(p_.type, rows() * p_.Dv),
        weights_(real_, rows() * p_.Lk) {}

  // Compares everything that is stored. Returns what was wrong, or nothing.
  std::string check() {
    forward();
    compare("output", out_);
    compare_lse();
    if (p_.group_rows > 64 && p_.B == 1) compare_lone_rows();
    if (stored("weights")) compare_weights();
    if (stored("entropy")) compare_sums();
    if (stored("pooled_max")) compare_pictures();
    if (stored("product")) compare_linear_forms();
    if (stored("query_gradient")) compare_gradients();
    if (stored("knockout")) compare_effects(), compare_divergences();
    return wrong_;
  }

  // All bits that the forward pass and the weights gave.
  std::vector<char> bits() const {
    std::vector<char> all;
    for (const Buffer* x : {&out_, &maximum_, &total_, &weights_})
      all.insert(all.end(), x->bytes.begin(), x->bytes.end());
    return all;
  }

 private:
  int64_t heads() const { return p_.B * p_.Hq; }
  int64_t rows() const { return heads() * p_.Lq; }
  bool stored(const char* name) const { return case_.find(std::string("right.") + name); }

  void complain(const std::string& what, int64_t at, double found, double right, double bound) {
    if (!wrong_.empty()) wrong_ += "; ";
    char text[120];
    std::snprintf(text, sizeof text, " at %d: %.9g; %.9g within %.3g is right", int(at), found,
                  right, bound);
    wrong_ += what + text;
  }

  // Whether a number is right: in the bound; NaN and infinities in the same places. A bound of
  // infinity leaves it open.
  static bool is_right(double found, double right, double bound) {
    if (bound == INFINITY) return true;
    if (std::isnan(right)) return std::isnan(found);
    return found == right || std::fabs(found - right) <= bound;
  }

  template <class Numbers>
  void compare(const std::string& what, const Numbers& found) {
    const int64_t n = case_.fields.at("right." + what).size();
    if (int64_t(found.size()) != n) return complain(what + "'s size", 0, double(n), 0, 0);
    for (int64_t i = 0; i < n; ++i)
      if (!compare_one(what, what, i, found[size_t(i)])) return;
  }
  bool compare_one(const std::string& said, const std::string& what, int64_t at, double found) {
    const double right = case_.number("right." + what, at);
    const double bound = case_.number("bound." + what, at);
    if (is_right(found, right, bound)) return true;
    complain(said, at, found, right, bound);
    return false;
  }

  void run_all(std::initializer_list<Job> jobs) const {
    for (const Job& job : jobs)
      if (!run(job, threads_, nullptr)) throw std::runtime_error("a pass was cancelled");
  }

  static Array array(Buffer& x, int64_t H, int64_t L, int64_t D) {
    const int64_t size = bytes_of(x.type);
    return {x.data(), {H * L * D * size, L * D * size, D * size, size}, x.type};
  }

  void forward() {
    Forward f{&p_,           array(out_, p_.Hq, p_.Lq, p_.Dv), maximum_.data(), total_.data(),
              nullptr, threads_};
    const Memory partial = allocate(target().partial_bytes(f));
    f.partial = partial.get();
    run_all({target().forward(f), target().merge(f)});
  }

  void compare_lse() {
    std::vector<double> lse;
    for (int64_t i = 0; i < rows(); ++i)
      lse.push_back(maximum_[i] * factor_of(p_) * std::log(2.0) + std::log(total_[i]));
    compare("lse", lse);
  }

  // The statistics of a row have the same bits where it is computed alone: with keys in the lanes.
  void compare_lone_rows() {
    for (int64_t i = 0; i < p_.Lq; ++i) {
      Problem p = scores_.problem;
      p.query.data = p.query.at(0, 0, i), p.Lq = 1, p.first += i, p.last += i;
      Buffer maximum(real_, p.Hq), total(maximum);
      run_all({target().forward({&p, {}, maximum.data(), total.data(), nullptr, threads_})});
      for (int64_t h = 0; h < p.Hq; ++h) {
        const double right = total_[h * p_.Lq + i];
        if (maximum[h] != maximum_[h * p_.Lq + i] || total[h] != right)
          return complain("a row alone", i, total[h], right, 0);
      }
    }
  }

  // One reduction, or several.
  template <class Ask>
  void reduce(Ask ask) {
    Reduce r{};
    r.problem = &scores_.problem;
    r.maximum = maximum_.data(), r.total = total_.data();
    r.whole_rows = true;
    r.starts = case_.data<int64_t>("starts");
    r.query_step = r.key_step = r.distance_step = 1;
    r.bins[0] = r.bins[1] = r.bin_step[0] = r.bin_step[1] = 1;
    r.bin_extent[0] = p_.Lq, r.bin_extent[1] = p_.Lk;
    ask(r);
    r.head1 = heads();
    const Memory chunks = allocate(target().chunk_bytes(r) * heads());
    r.chunks = chunks.get();
    run_all({target().reduce(r), target().collect(r)});
  }

  void compare_weights() {
    reduce([&](Reduce& r) { r.weights = weights_.data(); });
    compare("weights", weights_);
    if (!p_.sinks) compare_row_sums();
    compare_gathered();
    compare_topk();
    compare_strongest();
    compare_pairs();
  }

  // The weights are those of the forward pass: with its denominator they add up to 1.
  void compare_row_sums() {
    for (int64_t i = 0; i < rows(); ++i) {
      double sum = 0;
      for (int64_t j = 0; j < p_.Lk; ++j) sum += weights_[i * p_.Lk + j];
      if (!std::isnan(sum) && !is_right(sum, total_[i] == 0 ? 0 : 1, 1e-6))
        return complain("a row sum", i, sum, 1, 1e-6);
    }
  }

  // Chosen pairs have the bits of the matrix.
  void compare_gathered() {
    std::vector<int64_t> queries, keys;
    for (int64_t i = 0; i < p_.Lq; ++i)
      for (int64_t j = 0; j < p_.Lk; ++j) queries.push_back(i), keys.push_back(j);
    Buffer found(real_, rows() * p_.Lk);
    const Gather g{&scores_.problem, maximum_.data(),        total_.data(), queries.data(),
                   keys.data(),      int64_t(queries.size()), found.data()};
    run_all({target().gather(g)});
    for (int64_t i = 0; i < found.size(); ++i)
      if (found[i] != weights_[i] && !std::isnan(found[i]))
        return complain("a gathered weight", i, found[i], weights_[i], 0);
  }

  // The weights of some chosen places are the largest of all: in rising order of the places that
  // they leave, ties in any order.
  void compare_largest(const char* what, int64_t first, int64_t count, const Buffer& values,
                       int64_t from, int64_t n, const std::vector<int64_t>& places) {
    std::vector<bool> taken(static_cast<size_t>(count));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = places[size_t(i)];
      if (at < 0 || at >= count || taken[size_t(at)])
        return complain(std::string(what) + " has a place twice or none", i, double(at), 0, 0);
      taken[size_t(at)] = true;
      if (!compare_one(what, "weights", first + at, values[from + i])) return;
      if (i && values[from + i] > values[from + i - 1] * (1 + 1e-6))
        return complain(std::string(what) + " is not in order", i, values[from + i], 0, 0);
    }
    for (int64_t at = 0; n && at < count; ++at) {
      const double right = case_.number("right.weights", first + at);
      const double bound = case_.number("bound.weights", first + at);
      const double last = values[from + n - 1];
      if (!taken[size_t(at)] && right - 2 * bound > last * (1 + 1e-6))
        return complain(std::string(what) + " lacks one", at, last, right, bound);
    }
  }

  // Rows with NaN have no largest weight.
  bool has_nan(int64_t first, int64_t count) const {
    for (int64_t i = first; i < first + count; ++i)
      if (std::isnan(case_.number("right.weights", i))) return true;
    return false;
  }

  void compare_topk() {
    const int64_t k = p_.Lk < 5 ? p_.Lk : 5;
    Buffer values(real_, rows() * k);
    std::vector<int64_t> keys(size_t(rows() * k));
    reduce([&](Reduce& r) { r.k = k, r.top_values = values.data(), r.top_keys = keys.data(); });
    for (int64_t i = 0; i < rows(); ++i) {
      if (has_nan(i * p_.Lk, p_.Lk)) continue;
      const std::vector<int64_t> places(keys.begin() + i * k, keys.begin() + (i + 1) * k);
      compare_largest("top-k", i * p_.Lk, p_.Lk, values, i * k, k, places);
    }
  }

  void compare_strongest() {
    const int64_t n = 6, pairs = p_.Lq * p_.Lk;
    Buffer values(real_, heads() * n);
    std::vector<int64_t> query(size_t(heads() * n)), key(query);
    reduce([&](Reduce& r) {
      r.n = n, r.pair_query = query.data(), r.pair_key = key.data(), r.pair_weight = values.data();
    });
    for (int64_t h = 0; h < heads(); ++h) {
      if (has_nan(h * pairs, pairs)) continue;
      std::vector<int64_t> places;
      for (int64_t i = h * n; i < (h + 1) * n && query[size_t(i)] >= 0; ++i)
        places.push_back(query[size_t(i)] * p_.Lk + key[size_t(i)]);
      compare_largest("strongest", h * pairs, pairs, values, h * n, int64_t(places.size()), places);
    }
  }

  // The weights of the first head as a matrix of token pairs: its sums and its largest pairs.
  void compare_pairs() {
    if (p_.B != 1 || p_.Hq != 1 || has_nan(0, p_.Lq * p_.Lk)) return;
    const PairTerm only = term(scores_.problem, 0);
    const int64_t n = p_.Lq * p_.Lk < 6 ? p_.Lq * p_.Lk : 6;
    Buffer values(real_, n);
    std::vector<int64_t> query(static_cast<size_t>(n)), key(query);
    std::vector<double> received(size_t(p_.Lk));
    PairMatrix x{};
    x.terms = &only, x.term_count = 1, x.Lq = p_.Lq, x.Lk = p_.Lk;
    x.n = n, x.pair_query = query.data(), x.pair_key = key.data(), x.pair_value = values.data();
    x.received = received.data();
    x.bins[0] = x.bins[1] = 1, x.extent[0] = p_.Lq, x.extent[1] = p_.Lk;
    const Memory chunks = allocate(target().pair_chunk_bytes(x));
    x.chunks = chunks.get();
    run_all({target().reduce_pairs(x), target().collect_pairs(x)});
    if (stored("received")) compare("received", received);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < n && query[size_t(i)] >= 0; ++i)
      places.push_back(query[size_t(i)] * p_.Lk + key[size_t(i)]);
    compare_largest("strongest of pairs", 0, p_.Lq * p_.Lk, values, 0, int64_t(places.size()),
                    places);
  }

  // One head of a case without a batch, as a term of a matrix of token pairs.
  Problem one_head(int64_t h) const {
    Problem p = scores_.problem;
    p.query.data = p.query.at(0, h, 0), p.key.data = p.key.at(0, h * p.Hkv / p.Hq, 0);
    p.Hq = p.Hkv = 1;
    return p;
  }
  PairTerm term(const Problem& p, int64_t h) {
    const int64_t skip = h * p_.Lq * bytes_of(real_);
    PairTerm found{};
    found.problem = &p, found.coefficient = 1, found.kind = PairKind::weight;
    found.maximum = maximum_.data() + skip, found.total = total_.data() + skip;
    return found;
  }

  // Rows of a stored array in the type of sums.
  Buffer widened(const char* name, int64_t rows, int64_t D) const {
    Buffer x(real_, rows * D);
    for (int64_t i = 0; i < x.size(); ++i) {
      const double number = case_.number(name, i);
      const float single = float(number);
      std::memcpy(x.data() + i * bytes_of(real_),
                  real_ == Type::float64 ? (const void*)&number : &single, size_t(bytes_of(real_)));
    }
    return x;
  }

  // What cutting each pair of the first head does, key by key.
  void compare_effects() {
    const Problem p = one_head(0);
    Buffer value = widened("value", p_.Lk, p_.Dv), gradient = widened("gradient", p_.Lq, p_.Dv);
    PairTerm t = term(p, 0);
    t.kind = PairKind::knockout;
    t.value = value.data(), t.gradient = gradient.data(), t.Dv = p_.Dv;
    Buffer values(real_, p_.Lq * p_.Lk);
    std::vector<int64_t> keys(size_t(p_.Lq * p_.Lk));
    PairMatrix x{};
    x.terms = &t, x.term_count = 1, x.Lq = p_.Lq, x.Lk = p_.Lk;
    x.k = p_.Lk, x.top_values = values.data(), x.top_keys = keys.data();
    x.bins[0] = x.bins[1] = 1, x.extent[0] = p_.Lq, x.extent[1] = p_.Lk;
    const Memory chunks = allocate(target().pair_chunk_bytes(x));
    x.chunks = chunks.get();
    run_all({target().reduce_pairs(x), target().collect_pairs(x)});
    std::vector<double> found(keys.size(), NAN);
    for (int64_t i = 0; i < values.size(); ++i)
      found[size_t(i / p_.Lk * p_.Lk + keys[size_t(i)])] = values[i];
    compare("knockout", found);
  }

  // How far the first two heads are apart.
  void compare_divergences() {
    const Problem heads[] = {one_head(0), one_head(1)};
    const PairTerm a = term(heads[0], 0), b = term(heads[1], 1);
    std::vector<double> kl(size_t(p_.Lq)), reverse(kl), jensen_shannon(kl), variation(kl);
    Divergences x{};
    x.terms[0] = &a, x.terms[1] = &b, x.term_count[0] = x.term_count[1] = 1;
    x.Lq = p_.Lq, x.Lk = p_.Lk;
    x.kl = kl.data(), x.reverse_kl = reverse.data();
    x.jensen_shannon = jensen_shannon.data(), x.total_variation = variation.data();
    run_all({target().diverge(x)});
    compare("kl", kl), compare("reverse_kl", reverse);
    compare("jensen_shannon", jensen_shannon), compare("total_variation", variation);
  }

  void compare_sums() {
    std::vector<double> entropy(static_cast<size_t>(rows())), distance(entropy);
    std::vector<double> received(size_t(heads() * p_.Lk)), largest(received);
    reduce([&](Reduce& r) {
      r.entropy = entropy.data(), r.distance = distance.data(), r.received = received.data();
    });
    reduce([&](Reduce& r) { r.received_max = largest.data(); });
    compare("entropy", entropy), compare("distance", distance);
    if (stored("received")) compare("received", received), compare("received_max", largest);
  }

  void compare_pictures() {
    const int64_t* bins = case_.data<int64_t>("bins");
    Buffer largest(real_, heads() * bins[0] * bins[1]), mass(largest), alone(largest);
    const auto ask = [&](auto which) {
      reduce([&](Reduce& r) { r.bins[0] = bins[0], r.bins[1] = bins[1], which(r); });
    };
    ask([&](Reduce& r) { r.pooled_max = largest.data(), r.pooled_mass = mass.data(); });
    compare("pooled_max", largest), compare("pooled_mass", mass);
    if (p_.group_rows <= 64) return;
    const Buffer maximum(maximum_), total(total_);
    ask([&](Reduce& r) { r.finds_statistics = true, r.pooled_max = alone.data(); });
    compare("pooled_max", alone);
    maximum_ = maximum, total_ = total;
  }

  Operand operand(const char* name) const {
    return {case_.find(name)->bytes.data(), {0, 0}, case_.find(name)->shape[1]};
  }

  void compare_linear_forms() {
    const Operand x = operand("product_with"), y = operand("transposed_with");
    const int64_t* counts = case_.data<int64_t>("block_counts");
    const int64_t distances = p_.Lq + p_.Lk - 1;
    std::vector<int64_t> first;
    for (int64_t b = 0; b < p_.B; ++b)
      first.push_back(case_.data<int64_t>("starts")[b] - (p_.Lk - 1));
    Buffer product(real_, rows() * x.columns);
    std::vector<double> transposed(size_t(heads() * p_.Lk * y.columns));
    std::vector<double> blocks(size_t(heads() * counts[0] * counts[1])), largest(blocks);
    std::vector<double> diagonals(size_t(heads() * distances));
    const auto ask = [&](auto which) {
      reduce([&](Reduce& r) {
        r.query_blocks = case_.data<int64_t>("query_blocks");
        r.key_blocks = case_.data<int64_t>("key_blocks");
        r.block_counts[0] = counts[0], r.block_counts[1] = counts[1];
        which(r);
      });
    };
    ask([&](Reduce& r) {
      r.product_with = x, r.product = product.data();
      r.transposed_with = y, r.transposed = transposed.data();
      r.blocks = blocks.data();
      r.diagonals = diagonals.data(), r.distances = distances, r.first_distances = first.data();
    });
    ask([&](Reduce& r) { r.blocks_max = largest.data(); });
    compare("product", product), compare("transposed", transposed);
    compare("blocks", blocks), compare("blocks_max", largest), compare("diagonals", diagonals);
  }

  void compare_gradients() {
    std::vector<int64_t> ticket(size_t(p_.B * p_.Hkv * target().row_tiles(p_)));
    Buffer sums(real_, rows() * p_.D), query(p_.type, rows() * p_.D);
    Buffer key(p_.type, p_.B * p_.Hkv * p_.Lk * p_.D);
    Buffer value(p_.type, p_.B * p_.Hkv * p_.Lk * p_.Dv), bias(real_, rows() * p_.Lk);
    Backward g{};
    g.problem = &p_;
    g.out = array(out_, p_.Hq, p_.Lq, p_.Dv);
    g.grad = g.out, g.grad.data = case_.find("gradient")->bytes.data();
    g.weights.starts = case_.data<int64_t>("starts");
    g.maximum = maximum_.data(), g.total = total_.data();
    g.query_sum = sums.data(), g.query_grad = query.data();
    g.key_grad = key.data(), g.value_grad = value.data();
    g.ticket = ticket.data();
    if (stored("bias_gradient")) g.bias_grad = array(bias, p_.Hq, p_.Lq, p_.Lk);
    run_all({target().backward(g), target().bias_gradient(g)});
    compare("query_gradient", query), compare("key_gradient", key);
    compare("value_gradient", value);
    if (stored("bias_gradient")) compare("bias_gradient", bias);
  }

  const Case& case_;
  int threads_;
  Read whole_, scores_;  // with values, for the output; without, for the weights
  const Problem& p_;
  Type real_;
  Buffer maximum_, total_, out_, weights_;
  std::string wrong_;
};

// What was wrong with a case, also where threads change a bit of it.
std::string wrong_with(const Case& c) {
  Checker one(c, 1), two(c, 2);
  const std::string wrong = one.check();
  if (!wrong.empty()) return wrong;
  if (const std::string more = two.check(); !more.empty()) return "with two threads: " + more;
  return one.bits() == two.bits() ? "" : "two threads give other bits than one";
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return std::fprintf(stderr, "usage: stored_cases FILE\n"), 2;
  try {
    const std::vector<Case> cases = read_cases(words[1]);
    int failed = 0;
    for (const Case& c : cases) {
      const std::string wrong = wrong_with(c);
      failed += !wrong.empty();
      std::printf("%-28s %s\n", c.name.c_str(), wrong.empty() ? "right" : wrong.c_str());
    }
    std::printf("%s: ", target().name);
    if (failed) std::printf("%d failed, ", failed);
    std::printf("%d passed\n", int(cases.size()) - failed);
    return failed != 0 || cases.empty();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stored_cases: %s\n", error.what());
    return 2;
  }
}
