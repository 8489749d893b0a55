// The table of tuning values as text: what is taken from it, and what is passed over.
#include <fstream>
#include <sstream>

#include "base/tuning.h"
#include "store_fixtures.h"

namespace {

// A table in a directory of its own, which this process reads while the object lives.
class Table {
 public:
  Table() : path_(directory_.file("tuning")) { setenv("PHALANX_TUNING", path_.c_str(), 1); }
  ~Table() { unsetenv("PHALANX_TUNING"); }
  void write(const std::string &text) { std::ofstream(path_) << text; }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

 private:
  fixtures::TemporaryDirectory directory_;
  std::string path_;
};

// "host=1f3a... ranks=2 "
std::string row_start(int ranks) { return "host=" + phx::tuning_host() + " ranks=" + std::to_string(ranks) + " "; }

TEST(what_was_saved_is_read_again_for_groups_of_its_size_alone) {
  Table table;
  const phx::Tuning saved{0, 0, 1, 2, 3, UINT64_MAX};
  CHECK(phx::save_tuning("", 2, saved) == PHX_OK);
  const phx::Tuning read = phx::load_tuning(2), other = phx::load_tuning(3);
  CHECK(read.one_shot_bytes == 1 && read.chunk_bytes == 2 && read.streaming_bytes == 3);
  CHECK(read.push_bytes == UINT64_MAX);
  CHECK(other.one_shot_bytes == 0 && other.push_bytes == 0);
}

TEST(values_that_are_not_plain_digits_are_passed_over) {
  Table table;
  const std::string row = row_start(2);
  // -18446744073709551104 is 512 to strtoull.
  for (const std::string value : {"-18446744073709551104", "-1", "+512", "512k", "0x200", "18446744073709551616", ""}) {
    table.write(row + "one_shot_bytes=" + value + " chunk_bytes=4096\n");
    const phx::Tuning read = phx::load_tuning(2);
    CHECK(read.one_shot_bytes == 0 && read.chunk_bytes == 4096);
  }
  table.write(row + "one_shot_bytes=" + std::string("512\0k", 5) + "\n");
  CHECK(phx::load_tuning(2).one_shot_bytes == 0);
}

TEST(saving_leaves_the_rows_of_others_as_they_are) {
  Table table;
  const std::string others = "host=0 ranks=2 chunk_bytes=1\n# a remark\n" + row_start(3) + "chunk_bytes=7 unknown=8\n";
  table.write(others);
  CHECK(phx::save_tuning("", 2, phx::Tuning{0, 0, 5, 6, 7, 8}) == PHX_OK);
  CHECK(table.read().substr(0, others.size()) == others);
  CHECK(phx::load_tuning(2).chunk_bytes == 6 && phx::load_tuning(3).chunk_bytes == 7);
}

TEST(rows_of_gpus_are_by_their_name_how_many_ranks_there_are_and_whether_they_share_one) {
  Table table;
  CHECK(phx::save_tuning("", 2, phx::Tuning{0, 0, 5, 6, 7, 8}) == PHX_OK);
  const std::string host = table.read();
  const phx::GpuPlace here{"NVIDIA H100 80GB HBM3", 2, false};
  CHECK(phx::save_gpu_tuning("", here, phx::GpuTuning{0, 0, 1, 2, 3, 4, UINT64_MAX}) == PHX_OK);
  CHECK(phx::save_gpu_tuning("", {here.gpu, 2, true}, phx::GpuTuning{0, 0, 9, 9, 9, 9, 9}) == PHX_OK);
  CHECK(table.read() ==
        host +
            "gpu=NVIDIA_H100_80GB_HBM3 ranks=2 shared=0 line_bytes=1 two_shot_bytes=2 multicast_bytes=3 copy_bytes=4 "
            "thread_bytes=18446744073709551615\n"
            "gpu=NVIDIA_H100_80GB_HBM3 ranks=2 shared=1 line_bytes=9 two_shot_bytes=9 multicast_bytes=9 copy_bytes=9 "
            "thread_bytes=9\n");
  const phx::GpuTuning read = phx::load_gpu_tuning(here);
  CHECK(read.line_bytes == 1 && read.two_shot_bytes == 2 && read.multicast_bytes == 3 && read.copy_bytes == 4);
  CHECK(read.thread_bytes == UINT64_MAX);
  CHECK(phx::load_gpu_tuning({here.gpu, 2, true}).copy_bytes == 9);
  for (const phx::GpuPlace &other : {phx::GpuPlace{here.gpu, 3, false}, phx::GpuPlace{"NVIDIA H100", 2, false}})
    CHECK(phx::load_gpu_tuning(other).line_bytes == 0);
  CHECK(phx::save_gpu_tuning("", here, phx::GpuTuning{0, 0, 7, 2, 3, 4, 5}) == PHX_OK);
  CHECK(phx::load_gpu_tuning(here).line_bytes == 7 && phx::load_gpu_tuning({here.gpu, 2, true}).line_bytes == 9);
  CHECK(phx::load_tuning(2).chunk_bytes == 6);
}

// A name that would be two words, or would look like a value.
TEST(the_name_of_a_gpu_is_one_word_of_a_row) {
  Table table;
  const phx::GpuPlace strange{"a=b\tc\xc3\xa9 line_bytes=5", 2, true};
  CHECK(phx::save_gpu_tuning("", strange, phx::GpuTuning{0, 0, 1, 2, 3, 4, 5}) == PHX_OK);
  CHECK(table.read().substr(0, 42) == "gpu=a_b_c___line_bytes_5 ranks=2 shared=1 ");
  CHECK(phx::load_gpu_tuning(strange).line_bytes == 1);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
