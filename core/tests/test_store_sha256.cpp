// SHA-256 and HMAC-SHA256 against the vectors of their standards.
#include "check.h"
#include "store/sha256.h"

namespace {

using phx::store::Digest;

std::string hex(const Digest &digest) {
  std::string text;
  char pair[3];
  for (const uint8_t byte : digest) {
    std::snprintf(pair, sizeof pair, "%02x", byte);
    text += pair;
  }
  return text;
}

std::string sha256(const std::string &message) { return hex(phx::store::sha256(message)); }
std::string hmac(const std::string &key, const std::string &message) {
  return hex(phx::store::hmac_sha256(key, message));
}

TEST(sha256_gives_the_digests_of_the_standard) {  // FIPS 180-4, examples of NIST
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(
      sha256(
          "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnop"
          "qrstu") == "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(sha256(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(hmac_gives_the_codes_of_rfc_4231) {
  CHECK(hmac(std::string(20, '\x0b'), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hmac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (char c = 1; c <= 25; ++c) key.push_back(c);
  CHECK(hmac(key, std::string(50, '\xcd')) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hmac(std::string(131, '\xaa'),
             "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
             "hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(digests_are_equal_only_when_every_byte_is) {
  Digest a{}, b{};
  CHECK(phx::store::equal_in_constant_time(a, b));
  for (size_t i = 0; i < b.size(); ++i) {
    b = a;
    b[i] = 1;
    CHECK(!phx::store::equal_in_constant_time(a, b));
  }
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
